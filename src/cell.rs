//! What the 64 bits of a cell mean. Pure functions: no I/O, no atomics.
//!
//! A word is `value << 1 | waiting`: 63 bits of value, and one bit that says
//! that someone is parked on the cell. Because both live in one word, whoever
//! changes the cell with an atomic learns from the old word, for nothing,
//! whether anyone must be woken.
//!
//! * An **event** counts its transitions in the value. Odd means set.
//! * A **counter** is an `i63`, two's complement in the value bits; it wraps.
//! * **Locks**, **barriers** and **semaphores**: see [`sync`].

pub mod sync;

/// The bit that says that someone waits on this cell.
pub const WAITING: u64 = 1;

/// Smallest value that a counter can hold: -2^62.
pub const COUNTER_MIN: i64 = i64::MIN >> 1;

/// Largest value that a counter can hold: 2^62 - 1.
pub const COUNTER_MAX: i64 = i64::MAX >> 1;

/// What the cells of a removed array hold where clients reach them without
/// asking: no event comes there, and hardly a counter.
///
/// The waiting bit is set and stays, since nobody swaps from a tombstone and an
/// add leaves it. So whoever looks at the bit anyway needs to look further only
/// where it is set.
pub const TOMBSTONE: u64 = ((COUNTER_MIN + (3 << 40)) as u64) << 1 | WAITING;

/// Adds that did not know of the removal move a tombstone by less than this.
const DRIFT: u64 = 1 << 40;

/// Whether a word may be a [`TOMBSTONE`], or one that was added to. Whoever
/// meets such a word asks the server, which knows: a counter may hold it, too.
#[inline]
#[must_use]
pub const fn is_suspect(word: u64) -> bool {
    // The waiting bit goes to the top, above the value, so that one comparison
    // asks for both.
    const FIRST: u64 = TOMBSTONE.rotate_right(1) - DRIFT;
    word.rotate_right(1).wrapping_sub(FIRST) <= 2 * DRIFT
}

/// The value of a word, sign-extended from 63 bits.
#[must_use]
pub const fn value(word: u64) -> i64 {
    (word as i64) >> 1
}

/// Whether the waiting bit of a word is set.
#[must_use]
pub const fn is_waiting(word: u64) -> bool {
    word & WAITING != 0
}

/// The word that holds `value` with nobody waiting, or `None` if `value`
/// needs more than 63 bits: a value is never cut to fit.
#[must_use]
pub const fn pack(value: i64) -> Option<u64> {
    if value < COUNTER_MIN || value > COUNTER_MAX {
        return None;
    }
    Some((value as u64) << 1)
}

/// Whether the word of an event says "set" (an odd number of transitions).
#[must_use]
pub const fn event_is_set(word: u64) -> bool {
    value(word) & 1 == 1
}

/// An operation on one cell. The number is its code on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Read the word.
    Load = 1,
    /// Event: even -> odd. Changes nothing when set already.
    Set = 2,
    /// Event: odd -> even. Changes nothing when clear already.
    Clear = 3,
    /// Event: test and clear. For one of several callers the old word is set.
    Take = 4,
    /// Counter: put operand `a`.
    Store = 5,
    /// Counter: add operand `a`, wrapping in 63 bits.
    Add = 6,
    /// Counter: if the value is `a`, put `b`.
    CompareExchange = 7,
    /// Counter: put `a`, return what was there.
    Swap = 8,
    /// Counter: bitwise and with `a`.
    And = 9,
    /// Counter: bitwise or with `a`.
    Or = 10,
    /// Counter: bitwise exclusive or with `a`.
    Xor = 11,
    /// Not an atomic: how many waits are parked on the cell, from the server.
    Waiters = 12,
    /// Lock: take it for seat `a`, if it is free and nobody queues.
    Acquire = 13,
    /// Lock: free it, if token `a` and seat `b` hold it.
    Release = 14,
    /// Semaphore: take one permit, if there is one and nobody queues.
    Down = 15,
    /// Semaphore: give back `a` permits, if that leaves no more than `b`.
    Up = 16,
    /// Barrier of `b` parties: one arrival, by the session `a`, or whichever if
    /// that is 0.
    Arrive = 17,
    /// Barrier of `b` parties: break it, if it is where `a` says, see
    /// [`sync::Barrier::stage`]; at any time if `a` is [`sync::ANY_STAGE`].
    Break = 18,
    /// Barrier of `b` parties: begin anew, if it is in epoch `a` and anyone has
    /// arrived or it is broken.
    Reset = 19,
}

/// The operations by their codes.
const BY_CODE: [Option<Op>; 256] = {
    let mut table = [None; 256];
    let mut i = 0;
    while i < Op::ALL.len() {
        table[Op::ALL[i] as usize] = Some(Op::ALL[i]);
        i += 1;
    }
    table
};

impl Op {
    /// Every operation, in the order of its code.
    pub const ALL: [Op; 19] = [
        Op::Load,
        Op::Set,
        Op::Clear,
        Op::Take,
        Op::Store,
        Op::Add,
        Op::CompareExchange,
        Op::Swap,
        Op::And,
        Op::Or,
        Op::Xor,
        Op::Waiters,
        Op::Acquire,
        Op::Release,
        Op::Down,
        Op::Up,
        Op::Arrive,
        Op::Break,
        Op::Reset,
    ];

    /// The operation with this wire code.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Op> {
        BY_CODE[code as usize]
    }

    /// Whether the operation leaves every cell as it is.
    #[must_use]
    pub const fn is_read(self) -> bool {
        matches!(self, Op::Load | Op::Waiters)
    }

    /// Whether doing it twice is as good as doing it once, so that a client
    /// may send it again to a server that has forgotten the first time.
    #[must_use]
    pub const fn is_repeatable(self) -> bool {
        // A lock is taken for a seat, which a new session does not have any
        // more, and freed by a token, which nobody has twice. A break and a
        // reset name what they are meant for.
        matches!(
            self,
            Op::Load
                | Op::Waiters
                | Op::Set
                | Op::Clear
                | Op::Store
                | Op::Acquire
                | Op::Release
                | Op::Break
                | Op::Reset
        )
    }

    /// Whether it adds, whatever the word is: one fetch-and-add.
    #[must_use]
    pub const fn adds(self) -> bool {
        matches!(self, Op::Add | Op::Arrive)
    }

    /// The name that a person knows it by.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Op::Load => "load",
            Op::Set => "set",
            Op::Clear => "clear",
            Op::Take => "take",
            Op::Store => "store",
            Op::Add => "fetch_add",
            Op::CompareExchange => "compare_exchange",
            Op::Swap => "swap",
            Op::And => "fetch_and",
            Op::Or => "fetch_or",
            Op::Xor => "fetch_xor",
            Op::Waiters => "waiters",
            Op::Acquire => "lock",
            Op::Release => "unlock",
            Op::Down => "acquire",
            Op::Up => "release",
            Op::Arrive => "wait at a barrier",
            Op::Break => "abort",
            Op::Reset => "reset",
        }
    }
}

/// How the actor must change a word to carry out an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing to change: the word just read is the answer.
    None,
    /// Compare-and-swap from the word that was read to this one: the one who
    /// changes the word takes on the duty to ring. It drops the waiting bit,
    /// but where people queue: there the bit keeps others out meanwhile.
    Swap(u64),
    /// Fetch-and-add this. It leaves the waiting bit alone.
    Add(u64),
}

/// What `op` does to a cell that holds `word`. Operands are values, not words;
/// those that do not fit 63 bits must have been refused before.
#[must_use]
#[inline(always)]
pub const fn change(op: Op, word: u64, a: u64, b: u64) -> Change {
    let now = word & !WAITING;
    let next = match op {
        Op::Load | Op::Waiters => return Change::None,
        Op::Add => return Change::Add(a << 1),
        Op::Acquire | Op::Release => return sync::change_lock(op, word, a, b),
        Op::Down | Op::Up => return sync::change_semaphore(op, word, a, b),
        Op::Arrive | Op::Break | Op::Reset => return sync::change_barrier(op, word, a, b),
        Op::Set if event_is_set(word) => now,
        Op::Clear | Op::Take if !event_is_set(word) => now,
        // One more transition; 2^62 of them take a cell longer than any
        // machine lives, and the wrap is harmless when it comes.
        Op::Set | Op::Clear | Op::Take => now.wrapping_add(2),
        Op::Store | Op::Swap => a << 1,
        Op::CompareExchange if now == a << 1 => b << 1,
        Op::CompareExchange => now,
        Op::And => now & (a << 1),
        Op::Or => now | (a << 1),
        Op::Xor => now ^ (a << 1),
    };
    if next == now {
        // The value stays, so no waiter can be satisfied by this; leaving the
        // word alone also keeps the waiting bit where it is.
        Change::None
    } else {
        Change::Swap(next)
    }
}

/// Whether the one who has done this and found `word` before it must ring:
/// there are waiters, and it can be of use to them.
#[must_use]
pub const fn must_ring(op: Op, word: u64, b: u64) -> bool {
    match op {
        _ if !is_waiting(word) => false,
        Op::Arrive => sync::completes(word, b),
        _ => true,
    }
}

/// How a wait compares the value of a cell with its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Comparison {
    /// Not equal. An event wait is `Ne` the even value that it saw.
    Ne = 1,
    /// Equal.
    Eq = 2,
    /// Greater.
    Gt = 3,
    /// Greater or equal.
    Ge = 4,
    /// Less.
    Lt = 5,
    /// Less or equal.
    Le = 6,
}

impl Comparison {
    /// The comparison with this wire code.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Comparison> {
        Some(match code {
            1 => Comparison::Ne,
            2 => Comparison::Eq,
            3 => Comparison::Gt,
            4 => Comparison::Ge,
            5 => Comparison::Lt,
            6 => Comparison::Le,
            _ => return None,
        })
    }
}

/// What a wait waits for on one cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Condition {
    /// How to compare.
    pub comparison: Comparison,
    /// What with.
    pub value: i64,
}

impl Condition {
    /// Whether a cell that holds `word` satisfies the wait.
    #[must_use]
    pub const fn holds(self, word: u64) -> bool {
        let v = value(word);
        match self.comparison {
            Comparison::Ne => v != self.value,
            Comparison::Eq => v == self.value,
            Comparison::Gt => v > self.value,
            Comparison::Ge => v >= self.value,
            Comparison::Lt => v < self.value,
            Comparison::Le => v <= self.value,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn codes_are_what_they_say() {
        for op in Op::ALL {
            assert_eq!(Op::from_code(op as u8), Some(op));
        }
        assert_eq!(Op::from_code(0), None);
        assert_eq!((0..=255).filter_map(Op::from_code).count(), Op::ALL.len());
        for code in 0..=255u8 {
            if let Some(c) = Comparison::from_code(code) {
                assert_eq!(c as u8, code);
            }
        }
    }

    #[test]
    fn an_event_counts_its_transitions() {
        let Change::Swap(set) = change(Op::Set, 0, 0, 0) else {
            panic!("a clear event can be set")
        };
        assert!(event_is_set(set));
        assert_eq!(value(set), 1);
        assert_eq!(change(Op::Set, set, 0, 0), Change::None);
        let Change::Swap(clear) = change(Op::Clear, set | WAITING, 0, 0) else {
            panic!("a set event can be cleared")
        };
        assert_eq!(value(clear), 2);
        assert!(!is_waiting(clear), "a swap drops the waiting bit");
        assert_eq!(change(Op::Take, clear, 0, 0), Change::None);
    }

    #[test]
    fn a_change_of_nothing_keeps_the_waiting_bit() {
        let word = pack(7).unwrap() | WAITING;
        assert_eq!(change(Op::Store, word, 7, 0), Change::None);
        assert_eq!(change(Op::CompareExchange, word, 8, 9), Change::None);
        assert_eq!(change(Op::Or, word, 1, 0), Change::None);
    }

    #[test]
    fn tombstones_are_suspect_and_ordinary_words_are_not() {
        let moved = |by: i64| TOMBSTONE.wrapping_add((by << 1) as u64);
        for by in [0, 1, -1, 1 << 40, -(1 << 40)] {
            assert!(is_suspect(moved(by)), "{by}");
            assert!(!is_suspect(moved(by) & !WAITING), "nobody waits for a tombstone");
        }
        for by in [1 << 41, -(1 << 41)] {
            assert!(!is_suspect(moved(by)), "{by}");
        }
        for value in [COUNTER_MIN, COUNTER_MAX, 0, -1, i64::from(i32::MIN), 1 << 40, -(1 << 40)] {
            assert!(!is_suspect(pack(value).unwrap() | WAITING), "{value}");
        }
    }

    proptest! {
        #[test]
        fn counters_follow_i63(start in COUNTER_MIN..=COUNTER_MAX, d in COUNTER_MIN..=COUNTER_MAX) {
            let word = pack(start).unwrap();
            prop_assert_eq!(value(word), start);
            let Change::Add(delta) = change(Op::Add, word | WAITING, d as u64, 0) else {
                panic!("an add is an add")
            };
            let after = (word | WAITING).wrapping_add(delta);
            prop_assert!(is_waiting(after), "an add leaves the waiting bit");
            let wide = i128::from(start) + i128::from(d);
            let wrapped = ((wide << 65) >> 65) as i64;
            prop_assert_eq!(value(after), wrapped);
        }

        #[test]
        fn what_does_not_fit_is_refused(v in any::<i64>()) {
            match pack(v) {
                Some(word) => prop_assert_eq!(value(word), v),
                None => prop_assert!(!(COUNTER_MIN..=COUNTER_MAX).contains(&v)),
            }
        }

        #[test]
        fn bit_operations_act_on_values(a in COUNTER_MIN..=COUNTER_MAX, b in COUNTER_MIN..=COUNTER_MAX) {
            for (op, want) in [(Op::And, a & b), (Op::Or, a | b), (Op::Xor, a ^ b), (Op::Swap, b)] {
                let word = pack(a).unwrap() | WAITING;
                let got = match change(op, word, b as u64, 0) {
                    Change::Swap(next) => value(next),
                    Change::None => value(word),
                    Change::Add(_) => unreachable!("no add here"),
                };
                prop_assert_eq!(got, want);
            }
        }
    }
}
