//! What goes to stdout and stderr. Nothing here panics when nobody reads.

use crate::failure::{Answer, Failure};
use clap::error::ErrorKind;
use serde::Serialize;
use std::fmt::Display;
use std::io::{self, Write};

/// Standard output, as text or as JSON.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// Whether JSON was asked for.
    pub json: bool,
}

impl Output {
    /// Standard output.
    pub fn new(json: bool) -> Output {
        Output { json }
    }

    /// Prints `text`, or `value` if JSON was asked for. `false`: whoever read
    /// our output has gone, which is no failure (`farcell ls | head -1`).
    pub fn print(&self, text: impl Display, value: &impl Serialize) -> Result<bool, Failure> {
        if self.json { self.value(value) } else { self.text(text) }
    }

    /// Prints text, with a newline at its end if it has none.
    pub fn text(&self, text: impl Display) -> Result<bool, Failure> {
        let mut text = text.to_string();
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        self.bytes(text.as_bytes())
    }

    /// Prints one line of JSON.
    pub fn value(&self, value: &impl Serialize) -> Result<bool, Failure> {
        let mut line = serde_json::to_vec(value)
            .map_err(|e| Failure::Other(format!("cannot write the answer as JSON: {e}")))?;
        line.push(b'\n');
        self.bytes(&line)
    }

    /// Prints bytes as they are.
    pub fn bytes(&self, bytes: &[u8]) -> Result<bool, Failure> {
        let mut stdout = io::stdout().lock();
        match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            Err(e) => Err(Failure::Other(format!(
                "cannot print the answer to stdout: {}; the command itself was carried out",
                plain(&e)
            ))),
        }
    }
}

/// One line on stderr, of which nothing moves a terminal's cursor: words of others, such
/// as a server's reason, are in it.
pub fn complain(what: &str) {
    // If stderr is gone there is nobody left to tell.
    let line = what.replace(|c: char| c.is_control(), " ");
    let _ = writeln!(io::stderr(), "farcell: {line}");
}

/// What the argument parser has to say: help and version go to stdout; what is
/// wrong becomes one line.
pub fn usage(error: &clap::Error) -> Result<Answer, Failure> {
    let text = error.render();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            Output::new(false).text(text)?;
            Ok(Answer::Yes)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            // No arguments at all: someone who wants to know what there is.
            let _ = write!(io::stderr(), "{text}");
            Err(Failure::Usage("no command given; `farcell COMMAND --help` tells more".to_owned()))
        }
        _ => Err(Failure::Usage(one_line(&text.to_string()))),
    }
}

/// Makes one line of the paragraphs of the argument parser's message.
fn one_line(text: &str) -> String {
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let paragraphs = text.split("\n\n").map(|paragraph| {
        let words: Vec<&str> = paragraph.split_whitespace().collect();
        words.join(" ")
    });
    let kept: Vec<String> = paragraphs
        .filter(|p| !p.is_empty() && !p.starts_with("For more information"))
        .map(|p| match p.strip_prefix("Usage: ") {
            Some(usage) => format!("usage: {usage}"),
            None => p,
        })
        .collect();
    kept.join("; ")
}

/// The system's message without its number.
pub fn plain(e: &io::Error) -> String {
    let text = e.to_string();
    match text.split_once(" (os error") {
        Some((words, _)) => words.to_lowercase(),
        None => text,
    }
}

/// A table with two spaces between columns. The first `left` of them are
/// left-aligned, the others, numbers, right-aligned.
pub fn table(rows: &[Vec<String>], left: usize) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| {
        rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> = row
            .iter()
            .enumerate()
            .map(|(c, cell)| match c < left {
                true => format!("{cell:<width$}", width = widths[c]),
                false => format!("{cell:>width$}", width = widths[c]),
            })
            .collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usage_error_is_one_line() {
        let text = "error: the following required arguments were not provided:\n  <NAME>\n\nUsage: farcell get <NAME>\n\nFor more information, try '--help'.\n";
        assert_eq!(
            one_line(text),
            "the following required arguments were not provided: <NAME>; usage: farcell get <NAME>"
        );
    }

    #[test]
    fn tables_are_aligned() {
        let rows = [["a", "1"], ["long", "22"]].map(|r| r.map(str::to_owned).to_vec());
        assert_eq!(table(&rows, 1), "a      1\nlong  22\n");
    }
}
