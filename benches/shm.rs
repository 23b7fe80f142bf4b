//! Operations in shared memory against the bare ones on the same kind of page.
//!
//! One thread: a load, a fetch-and-add, a compare-and-swap on a page of a memory
//! file, and `is_set`, `fetch_add`, and `set` and `clear` in turn by the public
//! handles, in loops of which one of each kind follows on the other.
//!
//! Two processes, each on a core of its own: a word is changed and its futex
//! woken, the other process changes another word in answer; half of the time
//! there and back. "Asleep": after two milliseconds in which both slept; "hot":
//! at once; "spinning": nobody sleeps.

mod common;

use common::{
    Aim, Options, Part, Peer, Report, Result, Row, cores, farcell_client, farcell_server, part,
    pin, play, quantile, ready,
};
use farcell::segment::{Segment, sleep_on, wake_all};
use farcell::{Client, Counter, Event, TransportChoice};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::io::BufRead;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Operations of one kind in a loop.
const LOOP: u32 = 20_000;
/// How long both sleep before the one wakes the other.
const ASLEEP: Duration = Duration::from_millis(2);
/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(1);

fn main() -> Result<()> {
    match part() {
        Part::Driver(options) => drive(&options),
        Part::Peer(role, args) => match (role.as_str(), &args[..]) {
            ("partner", [core, path, server]) => partner(core.parse()?, path, server),
            _ if play(&role, &args)? => Ok(()),
            _ => Err(format!("no role {role:?}").into()),
        },
    }
}

fn drive(options: &Options) -> Result<()> {
    let mut report = Report::new("shm", options);
    let (a, b) = cores()?;
    pin(&[a])?;
    // A page that is as the server's are, and can be opened by the partner.
    let file = File::from(memfd_create(c"bench", MemfdFlags::CLOEXEC)?);
    file.set_len(Segment::bytes_of(512)? as u64)?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let page = Segment::of_file(file)?;
    let server = farcell_server(&[b], false)?;
    let client = connect(&server.addr, Duration::ZERO)?;
    if options.wants("one thread") {
        operations(&mut report, options, &page, &client)?;
    }
    if a == b {
        report.note("There is one core alone: nothing was measured between two processes.");
    } else if options.wants("two processes") {
        let mut partner = Peer::start("partner", &[&b.to_string(), &path, &server.addr])?;
        for kind in [Kind::Asleep, Kind::Hot, Kind::Spinning] {
            hand_offs(&mut report, options, kind, &page, &server.addr, &mut partner)?;
        }
    }
    report.print()
}

fn connect(addr: &str, spin: Duration) -> Result<Client> {
    let builder = farcell_client(addr)?.transport(TransportChoice::Shm);
    Ok(builder.spin(spin).connect()?)
}

/// Nanoseconds that each of [`LOOP`] operations takes.
fn time(mut work: impl FnMut()) -> f64 {
    let begun = Instant::now();
    for _ in 0..LOOP {
        work();
    }
    begun.elapsed().as_nanos() as f64 / f64::from(LOOP)
}

fn operations(
    report: &mut Report,
    options: &Options,
    page: &Segment,
    client: &Client,
) -> Result<()> {
    let cell = &page.cells()[8];
    let event = client.events("bench-event", 1, 1)?.at(0, 0)?;
    let counter = client.counters("bench-counter", 1, 1)?.at(0, 0)?;
    let rounds = if options.quick { 5 } else { 400 };
    let bare_load = || time(|| _ = black_box(black_box(cell).load(Ordering::Acquire)));
    let bare_add = || time(|| _ = black_box(black_box(cell).fetch_add(2, Ordering::AcqRel)));
    let mut now = cell.load(Ordering::Relaxed);
    let bare_swap = || {
        now = cell.load(Ordering::Relaxed);
        time(|| {
            let next = now.wrapping_add(2);
            let swapped =
                black_box(cell).compare_exchange(now, next, Ordering::AcqRel, Ordering::Acquire);
            _ = black_box(swapped);
            now = next;
        })
    };
    let place = "one thread, one cell";
    let mut add = |what, against, aim, (bare, ours)| {
        report.add(row([what, against, place], "ns", aim, bare, ours));
    };
    let (bare, ours) = in_turn(rounds, bare_load, || is_set(&event));
    let mut more: Vec<f64> = bare.iter().zip(&ours).map(|(b, o)| (o - b).max(0.001)).collect();
    add("is_set", "an atomic load", Aim::None, (bare, ours));
    let sums = in_turn(rounds, bare_add, || fetch_add(&counter));
    add("fetch_add", "an atomic fetch-and-add", Aim::AtMost(1.3), sums);
    let swaps = in_turn(rounds, bare_swap, || set_clear(&event));
    add("set and clear in turn", "an atomic compare-and-swap", Aim::AtMost(1.3), swaps);
    report.add(Row {
        what: "is_set, more than a load".to_owned(),
        against: "-".to_owned(),
        place: place.to_owned(),
        unit: "ns",
        limit: None,
        ours: quantile(&mut more, 0.5),
        values: more,
        aim: Aim::AtMost(2.0),
    });
    Ok(())
}

/// Rounds of the one and the other in turn.
fn in_turn(
    rounds: usize,
    mut bare: impl FnMut() -> f64,
    mut ours: impl FnMut() -> f64,
) -> (Vec<f64>, Vec<f64>) {
    (0..rounds).map(|_| (bare(), ours())).unzip()
}

/// A line of what was measured in turn.
fn row(
    what: [&str; 3],
    unit: &'static str,
    aim: Aim,
    mut bare: Vec<f64>,
    mut ours: Vec<f64>,
) -> Row {
    let values = bare.iter().zip(&ours).map(|(bare, ours)| ours / bare).collect();
    let [what, against, place] = what.map(str::to_owned);
    let (limit, ours) = (Some(quantile(&mut bare, 0.5)), quantile(&mut ours, 0.5));
    Row { what, against, place, unit, limit, ours, values, aim }
}

fn is_set(event: &Event) -> f64 {
    time(|| _ = black_box(black_box(event).is_set()))
}

fn fetch_add(counter: &Counter) -> f64 {
    time(|| _ = black_box(black_box(counter).fetch_add(1)))
}

fn set_clear(event: &Event) -> f64 {
    let mut set = false;
    time(|| {
        let changed = if set { black_box(event).clear() } else { black_box(event).set() };
        _ = black_box(changed);
        set = !set;
    })
}

// ---- two processes ----------------------------------------------------------

/// What both sides do between two hand-offs.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Asleep,
    Hot,
    Spinning,
}

/// One side of a hand-off: changes a word of its own, and waits for the other's.
trait Side {
    fn change(&mut self) -> Result<()>;
    fn await_change(&mut self) -> Result<()>;
}

/// A word and its futex.
struct Bare<'p> {
    mine: &'p AtomicU64,
    theirs: &'p AtomicU64,
    seen: u64,
    spinning: bool,
}

impl Side for Bare<'_> {
    fn change(&mut self) -> Result<()> {
        self.mine.fetch_add(2, Ordering::AcqRel);
        if !self.spinning {
            wake_all(self.mine);
        }
        Ok(())
    }

    fn await_change(&mut self) -> Result<()> {
        loop {
            let word = self.theirs.load(Ordering::Acquire);
            if word != self.seen {
                self.seen = word;
                return Ok(());
            }
            if self.spinning {
                std::hint::spin_loop();
            } else {
                sleep_on(self.theirs, word, LONG);
            }
        }
    }
}

/// Two events.
struct Ours {
    mine: Event,
    theirs: Event,
    seen: u64,
    set: bool,
    _client: Client,
}

impl Ours {
    fn new(server: &str, spinning: bool, first: bool) -> Result<Ours> {
        let client = connect(server, if spinning { LONG } else { Duration::ZERO })?;
        let events = client.events("bench-hand-off", 1, 64)?;
        // As far apart as the bare words: in lines that are not fetched together.
        let (a, b) = (events.at(0, 16)?, events.at(0, 32)?);
        let (mine, theirs) = if first { (a, b) } else { (b, a) };
        let (seen, set) = (theirs.transitions()?, mine.is_set()?);
        Ok(Ours { mine, theirs, seen, set, _client: client })
    }
}

impl Side for Ours {
    fn change(&mut self) -> Result<()> {
        let changed = if self.set { self.mine.clear()? } else { self.mine.set()? };
        self.set = !self.set;
        if changed { Ok(()) } else { Err("an event was not as it was left".into()) }
    }

    fn await_change(&mut self) -> Result<()> {
        self.seen = self.theirs.wait_after(self.seen)?;
        Ok(())
    }
}

fn bare(page: &Segment, spinning: bool, first: bool) -> Bare<'_> {
    let (a, b) = (&page.cells()[16], &page.cells()[32]);
    let (mine, theirs) = if first { (a, b) } else { (b, a) };
    Bare { mine, theirs, seen: theirs.load(Ordering::Acquire), spinning }
}

/// The other process: answers as often as it is told to.
fn partner(core: usize, path: &str, server: &str) -> Result<()> {
    pin(&[core])?;
    let page = Segment::of_file(OpenOptions::new().read(true).write(true).open(path)?)?;
    ready("here")?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let [who, spinning, times] = words[..] else {
            return Err(format!("no order: {line:?}").into());
        };
        let (spinning, times) = (spinning == "true", times.parse()?);
        match who {
            "bare" => answer(&mut bare(&page, spinning, false), times)?,
            _ => answer(&mut Ours::new(server, spinning, false)?, times)?,
        }
    }
    Ok(())
}

fn answer(side: &mut impl Side, times: u32) -> Result<()> {
    ready("ready")?;
    for _ in 0..times {
        side.await_change()?;
        side.change()?;
    }
    ready("done")
}

/// Microseconds of half the way there and back.
fn ask(side: &mut impl Side, kind: Kind, times: u32, partner: &mut Peer) -> Result<f64> {
    partner.hear()?;
    let mut all = Vec::new();
    for _ in 0..times {
        if kind == Kind::Asleep {
            std::thread::sleep(ASLEEP);
        }
        let begun = Instant::now();
        side.change()?;
        side.await_change()?;
        all.push(begun.elapsed().as_nanos() as f64 / 2000.0);
    }
    partner.hear()?;
    Ok(quantile(&mut all, 0.5))
}

fn hand_offs(
    report: &mut Report,
    options: &Options,
    kind: Kind,
    page: &Segment,
    server: &str,
    partner: &mut Peer,
) -> Result<()> {
    let (what, against, aim, times) = match kind {
        Kind::Asleep => ("set to wake-up, asleep", "a futex wake-up", 1.1, 30),
        Kind::Hot => ("set to wake-up, hot", "a futex wake-up", 1.1, 1000),
        Kind::Spinning => ("set to a spinning waiter", "a spinning load", 1.3, 5000),
    };
    let spinning = kind == Kind::Spinning;
    let mut ours = Ours::new(server, spinning, true)?;
    let rounds = if options.quick { 2 } else { 40 };
    let (mut limits, mut figures) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        partner.say(&format!("bare {spinning} {times}"))?;
        limits.push(ask(&mut bare(page, spinning, true), kind, times, partner)?);
        partner.say(&format!("ours {spinning} {times}"))?;
        figures.push(ask(&mut ours, kind, times, partner)?);
    }
    let what = [what, against, "two processes, a core each"];
    report.add(row(what, "us", Aim::AtMost(aim), limits, figures));
    Ok(())
}
