//! `farcell man`

use crate::failure::{Answer, Failure};
use crate::output::{Output, plain};
use clap_mangen::Man as Page;
use std::path::{Path, PathBuf};

/// Of the pages: that of this version's texts, so that the same program writes the
/// same pages.
const DATE: &str = "2026-11-30";

/// Write the manual pages, one for each command.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  farcell man ~/.local/share/man/man1 && man farcell-serve

The folder is made if it does not exist; pages that are there are replaced.

JSON: {\"pages\": [PATH, ...]}

Exit codes: 0 done, 2 usage, 5 any other failure")]
pub struct Man {
    /// Where to
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

#[derive(serde::Serialize)]
struct Written {
    pages: Vec<PathBuf>,
}

impl Man {
    /// Runs the command.
    pub fn run(self, out: &Output, command: clap::Command) -> Result<Answer, Failure> {
        let dir = &self.dir;
        let cannot = |e: std::io::Error| {
            Failure::Other(format!("cannot write manual pages to {}: {}", dir.display(), plain(&e)))
        };
        std::fs::create_dir_all(dir).map_err(cannot)?;
        let mut command = command.disable_help_subcommand(true);
        command.build();
        let mut pages = Vec::new();
        write(&command, dir, &mut pages).map_err(cannot)?;
        pages.sort();
        let list: String = pages.iter().map(|page| format!("{}\n", page.display())).collect();
        out.print(list, &Written { pages })?;
        Ok(Answer::Yes)
    }
}

fn write(command: &clap::Command, dir: &Path, pages: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        write(inner, dir, pages)?;
    }
    let path = dir.join(format!("{}.1", name(command)));
    std::fs::write(&path, page(command)?)?;
    pages.push(path);
    Ok(())
}

/// What a page is called: `farcell-serve`.
fn name(command: &clap::Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}

fn page(command: &clap::Command) -> std::io::Result<Vec<u8>> {
    // Examples, JSON and exit codes: their lines stay as they are.
    let more = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let command = command.clone().after_help(None::<&str>);
    let page = Page::new(command.clone())
        .title(name(&command).to_uppercase())
        .date(DATE)
        .source(concat!("farcell ", env!("CARGO_PKG_VERSION")))
        .manual("farcell manual");
    let mut bytes = Vec::new();
    page.render_title(&mut bytes)?;
    page.render_name_section(&mut bytes)?;
    page.render_synopsis_section(&mut bytes)?;
    page.render_description_section(&mut bytes)?;
    if command.get_arguments().any(|arg| !arg.is_hide_set()) {
        page.render_options_section(&mut bytes)?;
    }
    if command.has_subcommands() {
        page.render_subcommands_section(&mut bytes)?;
    }
    if !more.is_empty() {
        bytes.extend_from_slice(b".SH NOTES\n.nf\n");
        for line in more.lines() {
            bytes.extend_from_slice(as_it_is(line).as_bytes());
        }
        bytes.extend_from_slice(b".fi\n");
    }
    Ok(bytes)
}

/// A line that troff(1) leaves alone.
fn as_it_is(line: &str) -> String {
    let line = line.replace('\\', "\\e").replace('-', "\\-");
    let guard = if line.starts_with(['.', '\'']) { "\\&" } else { "" };
    format!("{guard}{line}\n")
}
