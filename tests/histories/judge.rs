//! From journals to histories of cells, and what is to be said of them.

use crate::checker::{Call, NEVER, is_linearizable};
use crate::journal::{Entry, Kind, Outcome};
use crate::shown::{shown, smaller};
use crate::spec::{Op, Ret};
use crate::stateright;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What happened to processes, by the clock of the journals.
#[derive(Debug, Default)]
pub struct Faults {
    /// The server was killed and was back.
    pub server_away: Vec<(u64, u64)>,
    /// A client was killed: the process and when.
    pub killed: Vec<(usize, u64)>,
    /// A client was stopped for longer than its lease: from when on, until when.
    pub stopped: Vec<(usize, u64, u64)>,
    /// What should be noticed by nobody: connections were cut, processes stopped for a
    /// moment. What, from when on, until when.
    pub others: Vec<(String, u64, u64)>,
}

impl Faults {
    /// All of them: what, from when on, until when.
    fn all(&self) -> Vec<(String, u64, u64)> {
        let server = self.server_away.iter().map(|f| ("the server was away".to_owned(), f.0, f.1));
        let killed = self.killed.iter().map(|f| (format!("client #{} was killed", f.0), f.1, f.1));
        let lapsed = self.stopped.iter().map(|f| (format!("client #{} had lapsed", f.0), f.1, f.2));
        server.chain(killed).chain(lapsed).chain(self.others.iter().cloned()).collect()
    }
}

/// What the judge has seen.
#[derive(Debug, Default)]
pub struct Seen {
    pub histories: usize,
    pub calls: usize,
    /// Calls that overlap the one before in the same history.
    pub overlaps: usize,
    pub unknown: usize,
    /// Which the other judge has looked at as well.
    pub twice: usize,
    /// The histories that cannot be: the kind, the run, and what is left of it.
    pub refused: Vec<(Kind, usize, Vec<Call>)>,
}

impl Seen {
    /// All that was refused, for people, and what had happened meanwhile.
    pub fn text(&self, faults: &Faults) -> String {
        let one = |(kind, run, calls): &(Kind, usize, Vec<Call>)| {
            let mut text = format!("the {kind:?} of run {run} cannot have done all this:\n");
            text += &shown(calls);
            let zero = calls.iter().map(|call| call.begin).min().unwrap_or(0);
            for (what, from, to) in faults.all() {
                // A second around it, in the same microseconds.
                let us = |ns: u64| (ns as f64 - zero as f64) / 1000.0;
                if us(to) > -1e6 && us(from) < 1e6 {
                    text += &format!("  {what} from {:.1} to {:.1}\n", us(from), us(to));
                }
            }
            text
        };
        self.refused.iter().map(one).collect::<Vec<_>>().join("\n")
    }
}

/// The histories of all cells. `last` is what was read when all was over, `names` says
/// who a process is.
pub fn histories(
    entries: &[Entry],
    faults: &Faults,
    names: &dyn Fn(usize) -> String,
) -> BTreeMap<(Kind, usize), Vec<Call>> {
    let numbers: HashMap<(usize, usize, u32), u32> = entries
        .iter()
        .enumerate()
        .map(|(i, e)| ((e.process, e.thread, e.number), i as u32 + 1))
        .collect();
    let released: BTreeSet<u32> = entries
        .iter()
        .filter(|e| matches!(e.end, Some((_, Outcome::Returned(Ret::Done)))))
        .filter_map(|e| match e.op {
            Op::Release(call) => Some(numbers[&(e.process, e.thread, call)]),
            _ => None,
        })
        .collect();
    let mut more = entries.len() as u32;
    let mut all: BTreeMap<(Kind, usize), Vec<Call>> = BTreeMap::new();
    for (i, entry) in entries.iter().enumerate() {
        let number = i as u32 + 1;
        let history = all.entry((entry.kind, entry.run)).or_default();
        let mut op = entry.op;
        if let Op::Release(call) = op {
            op = Op::Release(numbers[&(entry.process, entry.thread, call)]);
        }
        let (end, ret, happened) = match entry.end {
            Some((_, Outcome::Not)) => continue,
            Some((end, Outcome::Returned(Ret::Bool(false)))) if entry.kind == Kind::Lock => {
                let Op::Release(call) = op else { unreachable!("only an unlock is too late") };
                op = Op::TooLate(call);
                (end, Some(Ret::Done), true)
            }
            Some((end, Outcome::Returned(ret))) => (end, Some(ret), true),
            // It may have had it for a moment, and then has given it back.
            Some((end, Outcome::TimedOut)) => (end, None, false),
            Some((_, Outcome::Unknown)) | None => (NEVER, None, false),
        };
        let call = Call {
            number,
            who: names(entry.process) + &format!(".{}", entry.thread),
            op,
            ret,
            begin: entry.begin,
            end,
            happened,
        };
        let mut perhaps = |op, begin, end| {
            more += 1;
            let who = call.who.clone();
            Call { number: more, who, op, ret: None, begin, end, happened: false }
        };
        // What was under way when the server or the session went may be done again.
        let met = |&(from, to): &(u64, u64)| entry.begin <= to && end >= from;
        let asleep = faults.stopped.iter().filter(|s| s.0 == entry.process);
        let excuses: Vec<(u64, u64)> =
            faults.server_away.iter().copied().chain(asleep.map(|s| (s.1, s.2))).collect();
        if op.may_be_done_twice() && excuses.iter().any(met) {
            history.push(perhaps(op, entry.begin, end));
        }
        // One that has a lock when the server comes back may give it up again, lest two
        // have it, and then tries anew.
        let acquires = matches!(op, Op::Acquire | Op::TryAcquire);
        if acquires && excuses.iter().any(met) {
            let moment = perhaps(Op::Acquire, entry.begin, end);
            let over = perhaps(Op::Gone(moment.number), entry.begin, end);
            history.extend([moment, over]);
        }
        // A lock that is held comes free when the session ends, and one that nobody
        // knows of is given back.
        if acquires && ret != Some(Ret::Token(None)) {
            let killed = faults.killed.iter().filter(|k| k.0 == entry.process).map(|k| k.1);
            let stopped = faults.stopped.iter().filter(|s| s.0 == entry.process).map(|s| s.1);
            let ends = killed.chain(stopped).min();
            let from = if happened { ends } else { Some(entry.begin) };
            if let Some(from) = from.filter(|_| !released.contains(&number) || !happened) {
                history.push(perhaps(Op::Gone(number), from.max(entry.begin), NEVER));
            }
        }
        history.push(call);
    }
    all
}

/// Judges each history.
pub fn judge(all: &BTreeMap<(Kind, usize), Vec<Call>>) -> Seen {
    let mut seen = Seen { histories: all.len(), ..Seen::default() };
    for (&(kind, run), calls) in all {
        seen.calls += calls.len();
        seen.unknown += calls.iter().filter(|call| !call.happened).count();
        let mut in_order: Vec<&Call> = calls.iter().collect();
        in_order.sort_by_key(|call| call.begin);
        seen.overlaps += in_order.windows(2).filter(|w| w[1].begin < w[0].end).count();
        let accepted = is_linearizable(calls);
        if let Some(other) = stateright::is_linearizable(calls) {
            assert_eq!(other, accepted, "two judges differ on this:\n{}", shown(calls));
            seen.twice += 1;
        }
        // One is enough, and to make it small takes its time.
        if !accepted && seen.refused.is_empty() {
            seen.refused.push((kind, run, smaller(calls)));
        }
    }
    seen
}
