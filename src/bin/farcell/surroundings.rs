//! The environment: logging, and variables that nobody knows.

use crate::failure::Failure;
use crate::output::complain;
use std::io;
use tracing_subscriber::EnvFilter;

const LOG: &str = "FARCELL_LOG";

/// Starts logging to stderr. `-v` beats `FARCELL_LOG`. Without either a server
/// logs warnings; the other commands say what went wrong themselves, once.
pub fn start_log(verbose: u8, is_server: bool) -> Result<(), Failure> {
    let fallback = if is_server { "warn" } else { "off" };
    let filter = match verbose {
        0 => match std::env::var(LOG) {
            Ok(filter) if !filter.is_empty() => EnvFilter::builder()
                .parse(&filter)
                .map_err(|e| Failure::Usage(format!("{LOG}={filter:?} is no filter: {e}; use error, warn, info, debug, trace or target=level")))?,
            _ => EnvFilter::new(fallback),
        },
        1 => EnvFilter::new("info"),
        2 => EnvFilter::new("debug"),
        _ => EnvFilter::new("trace"),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
        // When stderr is gone there is nobody to tell.
        .log_internal_errors(false)
        .try_init()
        .map_err(|e| Failure::Other(format!("cannot start the log: {e}")))
}

/// A misspelt variable would silently mean the default.
pub fn warn_of_unknown_variables() {
    for what in farcell::diagnose::unknown_variables() {
        complain(&format!("warning: {what}"));
    }
}
