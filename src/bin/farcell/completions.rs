//! `farcell completions`

use crate::failure::{Answer, Failure};
use crate::output::Output;
use clap_complete::Shell;

/// Print completions for a shell.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  farcell completions bash > ~/.local/share/bash-completion/completions/farcell
  farcell completions fish > ~/.config/fish/completions/farcell.fish

Exit codes: 0 done, 2 usage, 5 any other failure")]
pub struct Completions {
    /// The shell
    shell: Shell,
}

impl Completions {
    /// Runs the command.
    pub fn run(self, out: &Output, command: &mut clap::Command) -> Result<Answer, Failure> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, command, "farcell", &mut script);
        out.bytes(&script)?;
        Ok(Answer::Yes)
    }
}
