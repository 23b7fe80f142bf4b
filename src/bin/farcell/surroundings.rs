//! The environment: logging, and variables that nobody knows.

use crate::failure::Failure;
use crate::output::complain;
use std::io;
use tracing_subscriber::EnvFilter;

const LOG: &str = "FARCELL_LOG";
const KNOWN: [&str; 9] = [
    "FARCELL_ADDR",
    "FARCELL_ADDR_FILE",
    "FARCELL_JOB",
    "FARCELL_JOB_DIR",
    "FARCELL_AUTHKEY_FILE",
    "FARCELL_TRANSPORT",
    "FARCELL_DEVICE",
    "FARCELL_GID_INDEX",
    LOG,
];

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
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("FARCELL_") && !KNOWN.contains(&&*name) {
            let likely = likely(&name);
            complain(&format!(
                "warning: the environment variable {name} means nothing here; is {likely} meant?"
            ));
        }
    }
}

/// What was probably meant by this variable.
fn likely(name: &str) -> &'static str {
    match name {
        "FARCELL_RDMA" => "FARCELL_TRANSPORT, or serve --rdma,",
        _ => KNOWN.iter().min_by_key(|known| distance(known, name)).unwrap_or(&LOG),
    }
}

/// Insertions, deletions and replacements between two words (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::{distance, likely};

    #[test]
    fn what_was_meant() {
        assert_eq!(likely("FARCELL_DEVICES"), "FARCELL_DEVICE");
        assert_eq!(likely("FARCELL_GIDINDEX"), "FARCELL_GID_INDEX");
        assert!(likely("FARCELL_RDMA").contains("FARCELL_TRANSPORT"));
    }

    #[test]
    fn distances() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("abc", "abc"), 0);
    }
}
