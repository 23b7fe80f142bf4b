//! Whether a history of one cell is linearizable: whether there is an order of its
//! calls in which each is at one moment between its begin and its end, and each
//! returns what it returned.
//!
//! The search is that of Wing and Gong ("Testing and verifying concurrent objects",
//! 1993), with the memory of Lowe ("Testing for linearizability", 2017): the same
//! calls done and the same state need not be looked at twice.

use crate::spec::{Op, Ret, State};
use std::collections::HashSet;

/// A time that never comes.
pub const NEVER: u64 = u64::MAX;

/// One call of a history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Not 0, and nobody else's.
    pub number: u32,
    /// Who called, for people.
    pub who: String,
    pub op: Op,
    /// What it returned; `None` if nobody knows.
    pub ret: Option<Ret>,
    /// When it began and when it had ended, in nanoseconds.
    pub begin: u64,
    pub end: u64,
    /// Whether it happened for certain. One that need not have happened did so
    /// between begin and end or not at all.
    pub happened: bool,
}

/// Most calls of a history.
pub const MOST: usize = 512;

/// Which calls are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Done([u64; MOST / 64]);

impl Done {
    fn has(&self, i: usize) -> bool {
        self.0[i / 64] >> (i % 64) & 1 == 1
    }

    fn with(mut self, i: usize) -> Done {
        self.0[i / 64] |= 1 << (i % 64);
        self
    }
}

/// Whether the history is linearizable.
///
/// # Panics
/// It has more than [`MOST`] calls.
pub fn is_linearizable(calls: &[Call]) -> bool {
    is_linearizable_within(calls, usize::MAX).expect("there are fewer states")
}

/// As [`is_linearizable`]; `None` if that is still open after so many states.
///
/// # Panics
/// It has more than [`MOST`] calls.
pub fn is_linearizable_within(calls: &[Call], states: usize) -> Option<bool> {
    assert!(calls.len() <= MOST, "a history of {} calls is too long", calls.len());
    let mut calls: Vec<&Call> = calls.iter().collect();
    // Those that end first are the likely next ones.
    calls.sort_by_key(|call| (call.end, call.begin));
    let better: Vec<Option<usize>> =
        (0..calls.len()).map(|i| (0..i).rev().find(|&j| is_as_good(calls[j], calls[i]))).collect();
    // Where the value only grows, a call that returned less than it is has come too late.
    let grows = calls.iter().all(|call| matches!(call.op, Op::Add(1..)) || call.op.only_reads());
    let first = Done([0; MOST / 64]);
    let mut seen = HashSet::from([(first, State::default())]);
    // An explicit stack: what is done, the state, the latest begin of what is done.
    let mut open = vec![(first, State::default(), 0)];
    while let Some((done, state, latest)) = open.pop() {
        let left = || calls.iter().enumerate().filter(|(i, _)| !done.has(*i));
        // Whoever has ended before another one began comes before it.
        let Some(first_end) = left().filter(|(_, c)| c.happened).map(|(_, c)| c.end).min() else {
            return Some(true);
        };
        if grows
            && left()
                .any(|(_, call)| call.happened && call.ret.is_some_and(|r| r.is_below(state.value)))
        {
            continue;
        }
        if seen.len() > states {
            return None;
        }
        let next: Vec<_> = left()
            .filter(|(_, call)| call.begin <= first_end && call.end >= latest)
            .filter(|(i, _)| better[*i].is_none_or(|better| done.has(better)))
            .filter_map(|(i, call)| {
                let state = state.after(call.op, call.number, call.ret)?;
                Some((done.with(i), state, latest.max(call.begin)))
            })
            .filter(|&(done, state, _)| seen.insert((done, state)))
            .collect();
        open.extend(next.into_iter().rev());
    }
    Some(false)
}

/// Whether the first one, if it is done in place of the second, explains all that this
/// would.
fn is_as_good(one: &Call, other: &Call) -> bool {
    let names_no_call =
        !matches!(one.op, Op::Acquire | Op::TryAcquire | Op::Release(_) | Op::Gone(_));
    let open = !one.happened && !other.happened;
    open && names_no_call
        && (one.op, one.ret) == (other.op, other.ret)
        && one.begin <= other.begin
        && one.end >= other.end
}
