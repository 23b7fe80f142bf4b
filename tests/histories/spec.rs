//! What a cell does when one operation after another is done on it.

use std::fmt;

/// A call on one cell. Which cell is not its matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    // Events.
    Set,
    Clear,
    IsSet,
    Take,
    Transitions,
    // Counters.
    Load,
    Store(i64),
    Add(i64),
    Cas(i64, i64),
    Swap(i64),
    // Locks. Who holds one is the number of the call that acquired it.
    Acquire,
    TryAcquire,
    Release(u32),
    /// An unlock that said that the lease is lost.
    TooLate(u32),
    /// The server ends what a session held that is gone.
    Gone(u32),
}

/// What a call returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ret {
    Done,
    Bool(bool),
    Value(i64),
    Cas(Result<i64, i64>),
    Token(Option<i64>),
}

/// What a cell holds: transitions of an event, the value of a counter, the last
/// token of a lock and the call that holds it, 0 for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct State {
    pub value: i64,
    pub holder: u32,
}

impl State {
    /// The state behind this call, if it can return this there; `None` as `ret`:
    /// whatever it returned, nobody knows it.
    pub fn after(self, op: Op, caller: u32, ret: Option<Ret>) -> Option<State> {
        let (next, real) = self.done(op, caller, ret)?;
        ret.is_none_or(|ret| ret == real).then_some(next)
    }

    /// The state behind it, and what it returns. `None`: it cannot be here.
    fn done(self, op: Op, caller: u32, ret: Option<Ret>) -> Option<(State, Ret)> {
        let State { value, holder } = self;
        let is_set = value & 1 == 1;
        let to = |value| State { value, holder };
        let held_by = |holder| State { value, holder };
        Some(match op {
            Op::Set => (to(if is_set { value } else { value + 1 }), Ret::Bool(!is_set)),
            Op::Clear | Op::Take => (to(if is_set { value + 1 } else { value }), Ret::Bool(is_set)),
            Op::IsSet => (self, Ret::Bool(is_set)),
            Op::Transitions | Op::Load => (self, Ret::Value(value)),
            Op::Store(new) => (to(new), Ret::Done),
            Op::Add(delta) => (to(value + delta), Ret::Value(value)),
            Op::Swap(new) => (to(new), Ret::Value(value)),
            Op::Cas(expected, new) if value == expected => (to(new), Ret::Cas(Ok(value))),
            Op::Cas(..) => (self, Ret::Cas(Err(value))),
            Op::Acquire | Op::TryAcquire => match ret {
                Some(Ret::Token(Some(token))) if holder == 0 && token > value => {
                    (State { value: token, holder: caller }, Ret::Token(Some(token)))
                }
                // Its token is not known, and tokens only have to grow.
                None if holder == 0 => (held_by(caller), Ret::Done),
                Some(Ret::Token(None)) if holder != 0 => (self, Ret::Token(None)),
                _ => return None,
            },
            Op::Release(call) if holder == call => (held_by(0), Ret::Done),
            Op::TooLate(call) if holder != call => (self, Ret::Done),
            Op::Gone(call) if holder == call => (held_by(0), Ret::Done),
            Op::Release(_) | Op::TooLate(_) | Op::Gone(_) => return None,
        })
    }
}

impl Op {
    /// Whether it leaves the cell as it was, whatever that was.
    pub fn only_reads(self) -> bool {
        matches!(self, Op::IsSet | Op::Transitions | Op::Load | Op::TooLate(_))
    }

    /// Whether the library may do it twice where the server or the session went
    /// away under it.
    pub fn may_be_done_twice(self) -> bool {
        matches!(self, Op::Set | Op::Clear | Op::Store(_))
    }
}

impl Ret {
    /// Whether it is a value, and smaller than this one.
    pub fn is_below(self, value: i64) -> bool {
        matches!(self, Ret::Value(returned) if returned < value)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Set => write!(f, "set()"),
            Op::Clear => write!(f, "clear()"),
            Op::IsSet => write!(f, "is_set()"),
            Op::Take => write!(f, "take()"),
            Op::Transitions => write!(f, "transitions()"),
            Op::Load => write!(f, "load()"),
            Op::Store(value) => write!(f, "store({value})"),
            Op::Add(delta) => write!(f, "fetch_add({delta})"),
            Op::Cas(expected, new) => write!(f, "compare_exchange({expected}, {new})"),
            Op::Swap(value) => write!(f, "swap({value})"),
            Op::Acquire => write!(f, "lock()"),
            Op::TryAcquire => write!(f, "try_lock()"),
            Op::Release(call) => write!(f, "unlock() of call {call}"),
            Op::TooLate(call) => write!(f, "unlock() of call {call}: lease lost"),
            Op::Gone(call) => write!(f, "the server ends what call {call} holds"),
        }
    }
}

impl fmt::Display for Ret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ret::Done => write!(f, "done"),
            Ret::Bool(yes) => write!(f, "{yes}"),
            Ret::Value(value) => write!(f, "{value}"),
            Ret::Cas(Ok(value)) => write!(f, "Ok({value})"),
            Ret::Cas(Err(value)) => write!(f, "Err({value})"),
            Ret::Token(Some(token)) => write!(f, "token {token}"),
            Ret::Token(None) => write!(f, "not had"),
        }
    }
}
