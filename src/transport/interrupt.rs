//! Operations that do not wait for others still wait for their answer, and for a
//! lost connection to come back. A program whose signals must be looked at on a
//! certain thread is asked meanwhile whether to give up.

use crate::error::Error;
use std::cell::Cell;
use std::time::Duration;

/// How often a thread is asked that cannot be woken by a signal. A person does not
/// notice more.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

thread_local! {
    static ASK: Cell<Option<fn() -> bool>> = const { Cell::new(None) };
}

/// From here on operations of this thread that have no answer yet call `ask`, 20
/// times a second and when a signal has come, and are given up when it answers
/// `true`: with [`Error::Cancelled`] if they did not happen, and with
/// [`Error::OutcomeUnknown`] if they may have. One that is answered at once asks
/// nothing. Waits are given up by their [`Canceller`](crate::Canceller) instead.
/// No lock is held around the call.
pub fn ask_while_blocked(ask: Option<fn() -> bool>) {
    ASK.set(ask);
}

/// Whether this thread is asked.
pub(crate) fn is_asked() -> bool {
    ASK.get().is_some()
}

/// Whether this thread is to give up.
pub(crate) fn gives_up() -> bool {
    ASK.get().is_some_and(|ask| ask())
}

/// The error of an operation that is given up; `may_have` happened.
pub(crate) fn given_up(addr: String, op: &'static str, may_have: bool) -> Error {
    match may_have {
        true => {
            let why = "it was given up before its answer came".to_owned();
            Error::OutcomeUnknown { addr, op, why }
        }
        false => Error::Cancelled,
    }
}
