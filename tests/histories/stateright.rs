//! The same question, put to the tester of the crate `stateright`. It has no memory of
//! what it has tried, so it is asked about short histories only.

use crate::checker::{Call, NEVER};
use crate::spec::{Op, Ret, State};
use stateright::semantics::{ConsistencyTester, LinearizabilityTester, SequentialSpec};

/// Longest history that it is asked about, and most calls in it that nobody knows the
/// end of.
const MOST: usize = 14;
const MOST_OPEN: usize = 3;

/// A cell, as the tester wants it: a call is what is done and its number.
#[derive(Clone, Debug, Default)]
struct Cell(State);

impl SequentialSpec for Cell {
    type Op = (Op, u32);
    type Ret = Ret;

    fn invoke(&mut self, &(op, number): &(Op, u32)) -> Ret {
        // Nobody has seen what it returned. Where it cannot be, it changes nothing.
        self.0 = self.0.after(op, number, None).unwrap_or(self.0);
        Ret::Done
    }

    fn is_valid_step(&mut self, &(op, number): &(Op, u32), ret: &Ret) -> bool {
        match self.0.after(op, number, Some(*ret)) {
            Some(next) => {
                self.0 = next;
                true
            }
            None => false,
        }
    }
}

/// Whether it is linearizable; `None` if the history is too long, or has calls that
/// the tester does not know: that may have happened, but not after some moment.
pub fn is_linearizable(calls: &[Call]) -> Option<bool> {
    let open = calls.iter().filter(|call| !call.happened).count();
    let unknown = calls.iter().any(|call| !call.happened && call.end != NEVER);
    if calls.len() > MOST || open > MOST_OPEN || unknown {
        return None;
    }
    let mut moments: Vec<(u64, bool, &Call)> = Vec::new();
    for call in calls {
        moments.push((call.begin, false, call));
        if call.happened {
            moments.push((call.end, true, call));
        }
    }
    // Of one moment the begins first: they are not behind what ends then.
    moments.sort_by_key(|&(at, is_end, _)| (at, is_end));
    let mut tester = LinearizabilityTester::new(Cell::default());
    for (_, is_end, call) in moments {
        // Each call is a thread of its own: what matters is when it was.
        let said = if is_end {
            tester.on_return(call.number, call.ret.unwrap()).map(drop)
        } else {
            tester.on_invoke(call.number, (call.op, call.number)).map(drop)
        };
        said.unwrap();
    }
    Some(tester.is_consistent())
}
