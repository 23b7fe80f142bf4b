//! The variables that farcell knows, and those that look as if it did.

use std::sync::atomic::{AtomicBool, Ordering};

/// Every environment variable that farcell reads: the library, the program and
/// the Python package.
pub const VARIABLES: [&str; 11] = [
    "FARCELL_ADDR",
    "FARCELL_ADDR_FILE",
    "FARCELL_JOB",
    "FARCELL_JOB_DIR",
    "FARCELL_AUTHKEY_FILE",
    "FARCELL_TRANSPORT",
    "FARCELL_DEVICE",
    "FARCELL_GID_INDEX",
    "FARCELL_TLS",
    "FARCELL_CLEAR_RDMA",
    "FARCELL_LOG",
];

/// Whether someone has been told.
static TOLD: AtomicBool = AtomicBool::new(false);

/// The variables of this process's environment that begin with `FARCELL_` and
/// mean nothing, each as a sentence that names the likely meant one. Whoever asks
/// is taken to show them: the library then does not log them itself.
#[must_use]
pub fn unknown_variables() -> Vec<String> {
    // Relaxed: a flag that orders nothing.
    TOLD.store(true, Ordering::Relaxed);
    unknown(std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned()))
}

/// Logs them, if nobody has been told in this process.
pub(crate) fn warn_once() {
    // Relaxed: as above.
    if !TOLD.swap(true, Ordering::Relaxed) {
        for what in unknown_variables() {
            tracing::warn!(target: "farcell::launch", "{what}");
        }
    }
}

fn unknown(names: impl Iterator<Item = String>) -> Vec<String> {
    let ours: Vec<String> = names.filter(|name| name.starts_with("FARCELL_")).collect();
    let services: Vec<&str> =
        ours.iter().filter_map(|name| name.strip_suffix("_SERVICE_HOST")).collect();
    let mut unknown: Vec<String> = ours
        .iter()
        .filter(|name| !VARIABLES.contains(&name.as_str()))
        .filter(|name| !services.iter().any(|service| is_of_service(name, service)))
        .cloned()
        .collect();
    unknown.sort();
    let told = |name: String| {
        let likely = likely(&name);
        format!("the environment variable {name} means nothing here; is {likely} meant?")
    };
    unknown.into_iter().map(told).collect()
}

/// Whether it is one of those that Kubernetes sets in every pod for a service that is
/// called `farcell`, or so to begin with, and has an address of its own.
fn is_of_service(name: &str, service: &str) -> bool {
    name.strip_prefix(service).is_some_and(|rest| {
        rest == "_PORT" || rest.starts_with("_PORT_") || rest.starts_with("_SERVICE_")
    })
}

/// What was probably meant by this variable.
fn likely(name: &str) -> &'static str {
    match name {
        "FARCELL_RDMA" => "FARCELL_TRANSPORT, or serve --rdma,",
        "FARCELL_KEY" | "FARCELL_AUTHKEY" | "FARCELL_KEY_FILE" => "FARCELL_AUTHKEY_FILE",
        "FARCELL_SERVER" | "FARCELL_HOST" | "FARCELL_PORT" => "FARCELL_ADDR",
        "FARCELL_DEBUG" | "FARCELL_VERBOSE" | "FARCELL_LOG_LEVEL" => "FARCELL_LOG",
        _ => VARIABLES.iter().min_by_key(|known| distance(known, name)).unwrap_or(&VARIABLES[0]),
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
    use super::*;

    #[test]
    fn what_was_meant() {
        for (given, meant) in [
            ("FARCELL_DEVICES", "FARCELL_DEVICE"),
            ("FARCELL_GIDINDEX", "FARCELL_GID_INDEX"),
            ("FARCELL_ADRR", "FARCELL_ADDR"),
            ("FARCELL_JOBDIR", "FARCELL_JOB_DIR"),
            ("FARCELL_AUTHKEY", "FARCELL_AUTHKEY_FILE"),
            ("FARCELL_LOGS", "FARCELL_LOG"),
        ] {
            assert_eq!(likely(given), meant);
        }
        assert!(likely("FARCELL_RDMA").contains("FARCELL_TRANSPORT"));
        let set = ["PATH", "FARCELL_ADDR", "FARCELL_ADR", "FARCELL_"].map(str::to_owned);
        let told = unknown(set.into_iter());
        assert_eq!(told.len(), 2);
        assert!(
            told[1].contains("FARCELL_ADR means nothing") && told[1].contains("is FARCELL_ADDR")
        );
    }

    #[test]
    fn what_kubernetes_sets_is_no_misspelling() {
        let of = |names: &[&str]| unknown(names.iter().map(|&name| name.to_owned()));
        let service = [
            "FARCELL_SERVICE_HOST",
            "FARCELL_SERVICE_PORT",
            "FARCELL_SERVICE_PORT_FARCELL",
            "FARCELL_PORT",
            "FARCELL_PORT_7117_TCP",
            "FARCELL_PORT_7117_TCP_ADDR",
            "FARCELL_METRICS_SERVICE_HOST",
            "FARCELL_METRICS_PORT",
        ];
        assert_eq!(of(&service), [""; 0]);
        // Only with the service that they belong to, and nothing else beside it.
        assert_eq!(of(&["FARCELL_PORT", "FARCELL_SERVICE_PORT"]).len(), 2);
        assert_eq!(of(&["FARCELL_SERVICE_HOST", "FARCELL_ADRR", "FARCELL_PORTS"]).len(), 2);
        assert_eq!(of(&["FARCELL_METRICS_SERVICE_HOST", "FARCELL_PORT"]).len(), 1);
    }

    #[test]
    fn the_list_has_what_the_library_reads() {
        for name in [
            crate::client::ENV_ADDR,
            crate::client::ENV_TRANSPORT,
            crate::client::ENV_DEVICE,
            crate::client::ENV_GID_INDEX,
            crate::client::launch::ENV_ADDR_FILE,
            crate::client::launch::ENV_JOB,
            crate::client::launch::ENV_JOB_DIR,
            crate::keyfile::ENV_KEY_FILE,
        ] {
            assert!(VARIABLES.contains(&name), "{name}");
        }
    }

    #[test]
    fn distances() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("abc", "abc"), 0);
    }
}
