//! The judge itself: histories of which it is known what they are, and many made by
//! chance, which another judge looks at too.

use crate::checker::{Call, NEVER, is_linearizable, is_linearizable_within};
use crate::common::random;
use crate::shown::{shown, smaller};
use crate::spec::{Op, Ret, State};
use crate::stateright;

fn call(number: u32, op: Op, ret: Ret, begin: u64, end: u64) -> Call {
    Call { number, who: String::new(), op, ret: Some(ret), begin, end, happened: true }
}

fn perhaps(number: u32, op: Op, begin: u64, end: u64) -> Call {
    Call { ret: None, happened: false, ..call(number, op, Ret::Done, begin, end) }
}

/// Both judges, where the other one can be asked.
fn verdict(calls: &[Call]) -> bool {
    let yes = is_linearizable(calls);
    if let Some(other) = stateright::is_linearizable(calls) {
        assert_eq!(yes, other, "{}", shown(calls));
    }
    yes
}

use Ret::{Bool, Cas, Done, Token, Value};

#[test]
fn what_overlaps_may_be_in_any_order() {
    let store = call(1, Op::Store(5), Done, 10, 20);
    for (value, begin, end, fine) in [
        (5, 12, 15, true),
        (0, 12, 15, true),
        (5, 21, 22, true),
        (0, 21, 22, false),
        (5, 5, 9, false),
        (0, 5, 9, true),
        // What ends in the moment in which another one begins is beside it.
        (5, 5, 10, true),
        (0, 20, 25, true),
    ] {
        let load = call(2, Op::Load, Value(value), begin, end);
        assert_eq!(verdict(&[store.clone(), load.clone()]), fine, "{load:?}");
        assert_eq!(verdict(&[load, store.clone()]), fine, "the order they are told in");
    }
}

#[test]
fn no_two_see_different_orders() {
    let stores = [call(1, Op::Store(1), Done, 0, 100), call(2, Op::Store(2), Done, 0, 100)];
    let loads = |a, b, c, d| {
        [
            call(3, Op::Load, Value(a), 10, 20),
            call(4, Op::Load, Value(b), 30, 40),
            call(5, Op::Load, Value(c), 10, 20),
            call(6, Op::Load, Value(d), 30, 40),
        ]
    };
    assert!(verdict(&[&stores[..], &loads(1, 2, 1, 2)].concat()));
    assert!(verdict(&[&stores[..], &loads(0, 2, 1, 2)].concat()));
    assert!(!verdict(&[&stores[..], &loads(1, 2, 2, 1)].concat()));
}

#[test]
fn a_lost_update_and_a_doubled_one_are_seen() {
    let adds = |a, b| [call(1, Op::Add(1), Value(a), 0, 10), call(2, Op::Add(1), Value(b), 0, 10)];
    assert!(verdict(&adds(0, 1)) && verdict(&adds(1, 0)));
    assert!(!verdict(&adds(0, 0)));
    assert!(!verdict(&adds(0, 2)));
    let after = call(3, Op::Load, Value(3), 20, 30);
    assert!(!verdict(&[&adds(0, 1)[..], std::slice::from_ref(&after)].concat()));
    // With one that may have happened, at any time since.
    let open = perhaps(4, Op::Add(1), 5, NEVER);
    assert!(verdict(&[&adds(0, 1)[..], &[after.clone(), open.clone()]].concat()));
    assert!(verdict(&[&adds(0, 1)[..], &[open]].concat()));
    // But not before it began, nor behind its end.
    let late = perhaps(4, Op::Add(1), 31, NEVER);
    assert!(!verdict(&[&adds(0, 1)[..], &[after.clone(), late]].concat()));
    let over = perhaps(4, Op::Add(1), 5, 15);
    let before = call(5, Op::Load, Value(2), 16, 18);
    assert!(verdict(&[&adds(0, 1)[..], &[after.clone(), over.clone()]].concat()));
    assert!(!verdict(&[&adds(0, 1)[..], &[after, over, before]].concat()));
}

#[test]
fn of_all_takers_one_gets_a_set() {
    let set = call(1, Op::Set, Bool(true), 0, 10);
    let take = |n, got| call(n, Op::Take, Bool(got), 5, 15);
    assert!(verdict(&[set.clone(), take(2, true), take(3, false)]));
    assert!(!verdict(&[set.clone(), take(2, true), take(3, true)]));
    // Done twice it may be taken twice, and then it says that it changed something.
    let again = perhaps(4, Op::Set, 0, 10);
    assert!(verdict(&[set.clone(), take(2, true), take(3, true), again.clone()]));
    let none = call(5, Op::Transitions, Value(2), 20, 21);
    assert!(!verdict(&[set, take(2, true), take(3, true), again, none]));
}

#[test]
fn a_compare_exchange_happens_or_tells_why_not() {
    let cas = |n, e, new, found| call(n, Op::Cas(e, new), Cas(found), 0, 10);
    assert!(verdict(&[cas(1, 0, 5, Ok(0)), cas(2, 0, 6, Err(5))]));
    assert!(!verdict(&[cas(1, 0, 5, Ok(0)), cas(2, 0, 6, Ok(0))]));
    assert!(!verdict(&[cas(1, 0, 5, Ok(0)), cas(2, 5, 6, Err(5))]));
}

#[test]
fn a_lock_has_one_holder_and_tokens_that_grow() {
    let lock = |n, token, begin, end| call(n, Op::Acquire, Token(Some(token)), begin, end);
    let unlock = |n, of, begin, end| call(n, Op::Release(of), Done, begin, end);
    let first = [lock(1, 1, 0, 10), unlock(2, 1, 20, 30)];
    assert!(verdict(&[&first[..], &[lock(3, 2, 5, 35)]].concat()));
    assert!(!verdict(&[&first[..], &[lock(3, 2, 11, 19)]].concat()), "two hold it");
    assert!(!verdict(&[&first[..], &[lock(3, 1, 31, 35)]].concat()), "the token did not grow");
    let tried = call(3, Op::TryAcquire, Token(None), 11, 19);
    assert!(verdict(&[&first[..], std::slice::from_ref(&tried)].concat()));
    assert!(!verdict(&[tried]), "it was free");
    // Its holder is killed, and then another one has it.
    let held = [lock(1, 1, 0, 10), lock(3, 2, 11, 40)];
    assert!(!verdict(&held));
    assert!(verdict(&[&held[..], &[perhaps(4, Op::Gone(1), 30, NEVER)]].concat()));
    assert!(!verdict(&[&held[..], &[perhaps(4, Op::Gone(1), 41, NEVER)]].concat()));
    let late = call(5, Op::TooLate(1), Done, 50, 60);
    assert!(!verdict(&[held[0].clone(), late.clone()]), "nobody has ended it");
    assert!(verdict(&[held[0].clone(), late, perhaps(4, Op::Gone(1), 30, NEVER)]));
}

/// A history as threads could have made it: each call is done at a moment between its
/// begin and its end.
fn made(seed: &mut u64, threads: u64, calls: u64) -> Vec<Call> {
    let mut moments = Vec::new();
    for thread in 0..threads {
        let mut time = random(seed, 30);
        for _ in 0..calls {
            let begin = time;
            let at = begin + random(seed, 30);
            let end = at + random(seed, 30);
            time = end + 1 + random(seed, 20);
            moments.push((at, thread, begin, end));
        }
    }
    moments.sort_unstable();
    let events = random(seed, 2) == 0;
    let mut state = State::default();
    let mut history = Vec::new();
    for (number, (_, _, begin, end)) in (1..).zip(moments) {
        let op = match (events, random(seed, 5)) {
            (true, 0 | 1) => Op::Set,
            (true, 2 | 3) => Op::Take,
            (true, _) => Op::Transitions,
            (false, 0) => Op::Store(random(seed, 3) as i64),
            (false, 1) => Op::Cas(random(seed, 3) as i64, random(seed, 3) as i64),
            (false, 2) => Op::Load,
            (false, _) => Op::Add(1),
        };
        let set = state.value & 1 == 1;
        let ret = match op {
            Op::Set => Bool(!set),
            Op::Take => Bool(set),
            Op::Store(_) => Done,
            Op::Cas(expected, _) if expected == state.value => Cas(Ok(state.value)),
            Op::Cas(..) => Cas(Err(state.value)),
            _ => Value(state.value),
        };
        state = state.after(op, number, Some(ret)).unwrap();
        history.push(call(number, op, ret, begin, end));
    }
    // Of some nobody has heard any more.
    for call in &mut history {
        if random(seed, 8) == 0 {
            *call = perhaps(call.number, call.op, call.begin, NEVER);
        }
    }
    history
}

#[test]
fn another_judge_comes_to_the_same_verdicts() {
    let (mut seed, mut asked, mut refused) = (1, 0, 0);
    for round in 0..3000 {
        let threads = 2 + random(&mut seed, 3);
        let mut history = made(&mut seed, threads, 3);
        assert!(is_linearizable(&history), "{}", shown(&history));
        if round % 2 == 1 {
            // One returned something else.
            let at = random(&mut seed, history.len() as u64) as usize;
            history[at].ret = history[at].ret.map(|ret| match ret {
                Bool(yes) => Bool(!yes),
                Value(value) => Value(value + 1),
                Cas(Ok(value)) => Cas(Err(value)),
                Cas(Err(value)) => Cas(Ok(value)),
                other => other,
            });
        }
        let verdict = is_linearizable(&history);
        refused += usize::from(!verdict);
        if let Some(other) = stateright::is_linearizable(&history) {
            assert_eq!(verdict, other, "{}", shown(&history));
            asked += 1;
        }
        if !verdict {
            let small = smaller(&history);
            assert!(!is_linearizable(&small), "{}", shown(&small));
            assert!(small.len() <= history.len());
        }
    }
    println!("{asked} histories judged twice, {refused} refused");
    assert!(asked > 1500 && refused > 500, "{asked}, {refused}");
}

#[test]
fn long_histories_take_no_time() {
    // All at once, in the one order that there is; and with one that cannot be.
    let mut adds: Vec<Call> =
        (0..400).map(|i| call(i as u32 + 1, Op::Add(1), Value(399 - i), 0, 1000)).collect();
    assert!(is_linearizable(&adds));
    adds[200].ret = Some(Value(7));
    assert!(!is_linearizable(&adds));
    // Many that may have happened or not.
    let mut seed = 5;
    let mut history = made(&mut seed, 6, 10);
    history.extend((0..12).map(|i| perhaps(1000 + i, Op::Add(1), 50, NEVER)));
    is_linearizable(&history);
}

/// As with the domain rule off: two add many at once, two add one by one beside them,
/// and every third add is lost.
#[test]
fn lost_adds_among_many_at_once_are_soon_found_and_made_small() {
    let mut moments: Vec<(u64, u64, u64)> = Vec::new();
    for i in 0..40 {
        moments.push((100 + 10 * i, 100, 600));
        moments.push((105 + 10 * i, 90, 700));
    }
    for i in 0..20 {
        moments.push((101 + 20 * i, 98 + 20 * i, 110 + 20 * i));
    }
    moments.sort_unstable();
    let mut value = 0;
    let history: Vec<Call> = (1..)
        .zip(moments)
        .map(|(number, (_, begin, end))| {
            let call = call(number, Op::Add(1), Value(value), begin, end);
            value += i64::from(number % 3 != 0);
            call
        })
        .collect();
    assert_eq!(is_linearizable_within(&history, 1000), Some(false));
    let small = smaller(&history);
    let counts = small.iter().filter(|call| call.happened).count();
    println!("{}", shown(&small));
    assert!(counts <= 4 && !is_linearizable(&small), "{}", shown(&small));
}

#[test]
fn what_is_shown_is_small_and_can_be_read() {
    let mut history: Vec<Call> = (0..40)
        .map(|i| {
            call(i + 1, Op::Add(1), Value(i64::from(i)), 10 * u64::from(i), 10 * u64::from(i) + 15)
        })
        .collect();
    // A store that had returned is not seen.
    history.push(call(90, Op::Store(1000), Done, 500, 510));
    history.push(call(91, Op::Load, Value(40), 520, 530));
    let small = smaller(&history);
    let text = shown(&small);
    println!("{text}");
    let counts: Vec<&Call> = small.iter().filter(|call| call.happened).collect();
    assert_eq!(counts.len(), 2, "{text}");
    assert!(text.contains("store(1000) -> done") && text.contains("load() -> 40"), "{text}");
}
