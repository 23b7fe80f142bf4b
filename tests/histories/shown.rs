//! A history that is not linearizable, made small, for people.

use crate::checker::{Call, NEVER, is_linearizable, is_linearizable_within};
use std::fmt::Write;

/// How many states are looked at to see that a call can be left out. The more of them
/// may have happened or not, the more states there are.
const ENOUGH: usize = 50_000;

/// The history with as few calls that count as there can be. Everything that is done
/// to it makes it easier to explain, so what is left is still a reason to refuse the
/// whole one:
/// - what had ended by some moment is explained whenever the whole is, if what was
///   under way then may have happened or not;
/// - a call that may have happened or not, and returned anything, explains whatever
///   it explained before.
///
/// # Panics
/// It is linearizable.
pub fn smaller(calls: &[Call]) -> Vec<Call> {
    assert!(!is_linearizable(calls));
    let mut ends: Vec<u64> = calls.iter().filter(|c| c.happened).map(|c| c.end).collect();
    ends.sort_unstable();
    let until = |end: u64| -> Vec<Call> {
        let begun = calls.iter().filter(|c| c.begin <= end).cloned();
        begun.map(|call| if call.end > end { open(call) } else { call }).collect()
    };
    let refused = |calls: &[Call]| is_linearizable_within(calls, ENOUGH) == Some(false);
    let first = ends.partition_point(|&end| !refused(&until(end)));
    let some = ends.get(first).map(|&end| until(end)).filter(|some| refused(some));
    let mut left = some.unwrap_or_else(|| calls.to_vec());
    // Many at once first: of most calls nothing depends.
    let mut size = left.len();
    while size > 0 {
        for begin in (0..left.len()).step_by(size).rev() {
            let mut with = left.clone();
            for call in with.iter_mut().skip(begin).take(size).filter(|call| call.happened) {
                *call = open(call.clone());
            }
            if with != left && refused(&with) {
                left = with;
            }
        }
        size /= 2;
    }
    // Nobody needs those to see it.
    left.retain(|call| call.happened || !call.op.only_reads());
    left.sort_by_key(|call| call.begin);
    left
}

/// The same call, of which nobody knows anything any more.
fn open(call: Call) -> Call {
    Call { ret: None, end: NEVER, happened: false, ..call }
}

/// The calls, a line each, in the order in which they began; those of which nothing is
/// known, and that are the same, share one.
pub fn shown(calls: &[Call]) -> String {
    let zero = calls.iter().map(|c| c.begin).min().unwrap_or(0);
    let us = |ns: u64| (ns - zero) as f64 / 1000.0;
    let mut text = String::from("  call        begin          end (us)  by\n");
    let mut left = calls;
    while let [call, behind @ ..] = left {
        let like = |other: &&Call| !other.happened && (other.op, other.end) == (call.op, call.end);
        let more = if call.happened { 0 } else { behind.iter().take_while(like).count() };
        left = &behind[more..];
        let end = if call.end == NEVER { "never".into() } else { format!("{:.1}", us(call.end)) };
        let what = match (call.happened, call.ret) {
            (true, Some(ret)) => format!("{} -> {ret}", call.op),
            (true, None) => format!("{} -> ?", call.op),
            (false, _) if more > 0 => format!("({}, or not; and {more} more)", call.op),
            (false, _) => format!("({}, or not)", call.op),
        };
        let (number, who, begin) = (call.number, &call.who, us(call.begin));
        writeln!(text, "  {number:4} {begin:12.1} {end:>12}       {who:<12} {what}").unwrap();
    }
    text
}
