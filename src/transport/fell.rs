//! Telling the server which transports a client does not have, and why, so that
//! the one who operates it learns of it.

use super::tcp::Link;
use crate::engine::Way;
use crate::wire::{FellReason, FellRecord};

/// What a sentence for people says, as a code.
fn reason_of(why: &str) -> FellReason {
    let any = |words: &[&str]| words.iter().any(|word| why.contains(word));
    // What follows are the server's words, of its own library and adapters.
    if why.starts_with("the server does not offer it") {
        FellReason::NotOffered
    } else if any(&["was asked for"]) {
        FellReason::Asked
    } else if any(&["libibverbs.so", "no libibverbs", "cannot load libibverbs"]) {
        FellReason::NoLibrary
    } else if any(&["the server has none", "told not to offer"]) {
        FellReason::NotOffered
    } else if any(&["on another machine", "another network namespace", "a virtual one"]) {
        FellReason::Elsewhere
    } else if any(&["memlock", "limit of locked memory", "ulimit -l"]) {
        FellReason::Memlock
    } else if any(&["no RDMA device", "has no port", "/dev/infiniband"]) {
        FellReason::NoDevice
    } else if any(&[" is DOWN", " is INIT", " is ARMED", "is down"]) {
        FellReason::PortDown
    } else if any(&["retry", "in time", "cannot reach", "did not answer", "no address", "no GID"]) {
        FellReason::Unreachable
    } else {
        FellReason::Other
    }
}

/// What a server that does not offer a way says of that, as a reason here.
pub(crate) fn not_offered(said: &[u8]) -> String {
    let said = String::from_utf8_lossy(said);
    let why = said.strip_prefix("the server has none: ").unwrap_or(&said);
    format!("the server does not offer it: {why}")
}

/// Tells the server why this way is not had. Not answered, and not said again
/// when the connection breaks: a number for people.
pub(crate) fn tell(link: &Link, wanted: Way, why: &str) {
    send(link, wanted, reason_of(why), why);
}

/// Tells the server that this way was had and is lost.
pub(crate) fn tell_lost(link: &Link, wanted: Way, why: &str) {
    send(link, wanted, FellReason::Lost, why);
}

fn send(link: &Link, wanted: Way, reason: FellReason, why: &str) {
    let text = crate::wire::plain_text(why.as_bytes());
    let record = FellRecord { wanted: wanted as u8, reason: reason as u8, text: 0, reserved: 0 };
    link.tell_fell(&record, &text);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs;

    #[test]
    fn sentences_that_are_said_have_their_codes() {
        let cases = [
            ("tcp was asked for", FellReason::Asked),
            ("the server does not offer it (farcell serve -v says why)", FellReason::NotOffered),
            ("the server does not offer it: no libibverbs.so.1 here", FellReason::NotOffered),
            ("the server has none: it was told not to offer it", FellReason::NotOffered),
            (
                "the server is on another machine, or in another network namespace (a; this one is b)",
                FellReason::Elsewhere,
            ),
            ("the server is on another machine, or in a virtual one", FellReason::Elsewhere),
            ("rxe0 port 1, GID 1 (::): transport retry counter exceeded", FellReason::Unreachable),
            ("the server did not answer in time", FellReason::Unreachable),
            ("what nobody has thought of", FellReason::Other),
        ];
        for (why, reason) in cases {
            assert_eq!(reason_of(why), reason, "{why}");
        }
    }

    #[test]
    fn errors_of_verbs_have_their_codes() {
        let place = verbs::Place { device: "mlx5_0".to_owned(), port: Some(1) };
        let memlock = verbs::Error::Memlock {
            place,
            limit: 65_536,
            needed: 8 << 20,
            pinned: None,
            errno: 12,
        };
        assert_eq!(reason_of(&memlock.to_string()), FellReason::Memlock);
        // Whichever it is: this machine has no library or no device, or it works.
        if let Err(error) = crate::rdma::Adapter::open(None) {
            assert_ne!(reason_of(&error.to_string()), FellReason::Other, "{error}");
        }
    }
}
