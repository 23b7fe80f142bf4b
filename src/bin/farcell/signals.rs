//! SIGINT and SIGTERM ask the program to end; a second one ends it.

use crate::failure::Failure;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Calls `asked` once, from a thread of its own, when the program is asked to
/// end. The second signal does what it does to any program.
pub fn on_end(asked: impl FnOnce(i32) + Send + 'static) -> Result<(), Failure> {
    let cannot = |e: std::io::Error| Failure::Other(format!("cannot listen for signals: {e}"));
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(cannot)?;
    let watch = move || {
        let mut asked = Some(asked);
        for signal in signals.forever() {
            match asked.take() {
                Some(asked) => asked(signal),
                None => {
                    let _ = signal_hook::low_level::emulate_default_handler(signal);
                }
            }
        }
    };
    std::thread::Builder::new()
        .name("farcell-signals".to_owned())
        .spawn(watch)
        .map(drop)
        .map_err(cannot)
}
