//! What the library costs over bare verbs, and what RDMA gains over TCP, all
//! on one machine and in one run. Rounds are short and alternate, so that what
//! else happens on the machine hits all alike: only the ratios mean anything
//! where the device is emulated.
//!
//! ```text
//! cargo bench --bench rdma -- [--quick] [--json]
//! ```
//! Without a device it says so and succeeds, unless `FARCELL_TEST_RDMA` is
//! `required`. `scripts/rdma-bench` runs it on soft-RoCE, next to perftest.

#![allow(missing_docs, reason = "a program")]
#![allow(unsafe_code, reason = "the floor is made of the C library's own calls")]

mod bare;

use bare::{Ask, Bare, Safe};
use farcell::{Batch, Client, Counter, Event, Key, RdmaChoice, Server, TransportChoice, verbs};
use std::fmt::Write as _;
use std::sync::mpsc;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() {
    if let Err(error) = run() {
        eprintln!("rdma: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<()> {
    let (mut quick, mut json) = (false, false);
    for arg in std::env::args().skip(1) {
        match arg.as_str() {
            "--quick" => quick = true,
            "--json" => json = true,
            // cargo's own.
            "--bench" => {}
            other => return Err(format!("{other}: use --quick, --json").into()),
        }
    }
    if let Err(error) = verbs::library().and_then(verbs::DeviceList::new) {
        if std::env::var("FARCELL_TEST_RDMA").is_ok_and(|v| v == "required") {
            return Err(format!("FARCELL_TEST_RDMA=required, but: {error}").into());
        }
        println!("NOT MEASURED, no device: {error}");
        return Ok(());
    }
    let plan = if quick {
        Plan { rounds: 5, ops: 50, wakes: 5, streams: 1 }
    } else {
        Plan { rounds: 21, ops: 100, wakes: 10, streams: 1 }
    };
    let results = measure(&plan)?;
    print!("{}", if json { results.json() } else { results.text() });
    Ok(())
}

/// How much of everything.
struct Plan {
    rounds: usize,
    /// Operations of one kind in a round.
    ops: usize,
    wakes: usize,
    /// Batches of one kind in a round.
    streams: usize,
}

// ---- what is measured -------------------------------------------------------

/// Operations of one batch at full depth.
const BATCH: usize = 1024;

/// A client with what it works on.
struct Side {
    _client: Client,
    event: Event,
    counter: Counter,
    loads: Batch,
    adds: Batch,
    loads16: Batch,
}

impl Side {
    fn new(server: &Server, choice: TransportChoice, cell: usize) -> Result<Side> {
        let client =
            Client::builder().addr(server.address()).key(key()?).transport(choice).connect()?;
        let event = client.events("e", 1, 64)?.at(0, cell)?;
        let counter = client.counters("c", 1, 64)?.at(0, cell)?;
        let (mut loads, mut adds, mut loads16) = (client.batch(), client.batch(), client.batch());
        for i in 0..BATCH {
            loads.load(&counter);
            adds.fetch_add(&counter, 1);
            if i < 16 {
                loads16.load(&counter);
            }
        }
        Ok(Side { _client: client, event, counter, loads, adds, loads16 })
    }
}

fn key() -> Result<Key> {
    Ok(Key::new(*b"a key for a measurement")?)
}

fn measure(plan: &Plan) -> Result<Results> {
    let server = Server::builder(key()?).bind("127.0.0.1:0").rdma(RdmaChoice::Auto).start()?;
    let (rdma, tcp) = (TransportChoice::Rdma, TransportChoice::Tcp);
    // The cells of the two transports are far apart.
    let fast = [Side::new(&server, rdma, 0)?, Side::new(&server, rdma, 0)?];
    let slow = [Side::new(&server, tcp, 32)?, Side::new(&server, tcp, 32)?];
    let mut bare = [Bare::open()?, Bare::open()?];
    let safe = Safe::open()?;
    let fast_wake = Wake::start(&server, rdma, 8)?;
    let slow_wake = Wake::start(&server, tcp, 40)?;
    let mut results = Results { rows: Vec::new(), clock: clock(), rounds: plan.rounds };

    let n = plan.ops;
    let [first, second] = &mut bare;
    let mut samples: Vec<(&'static str, Vec<Vec<u64>>)> =
        SERIES.iter().map(|name| (*name, Vec::new())).collect();
    for round in 0..plan.rounds + 1 {
        let mut order: Vec<usize> = (0..SERIES.len()).collect();
        // Every other round backwards: what comes first is not always first.
        if round % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let name = SERIES[index];
            let side = |name: &str| if name.starts_with("tcp") { &slow } else { &fast };
            let taken = match name {
                "bare read" => times(n, || Ok(first.run(Ask::Read)))?,
                "bare add" => times(n, || Ok(first.run(Ask::Add)))?,
                "safe read" => times_of(n, || safe.run(Ask::Read))?,
                "safe add" => times_of(n, || safe.run(Ask::Add))?,
                "bare cas" => {
                    let mut word = first.run(Ask::Read);
                    times(n, || {
                        let found = first.run(Ask::Swap(word, word + 2));
                        assert_eq!(found, word, "nobody else is here");
                        word += 2;
                        Ok(found)
                    })?
                }
                // The same pattern as the hand-off: every other swap is not
                // timed and is made by another queue pair.
                "bare cas in turns" => {
                    let mut word = first.run(Ask::Read);
                    let mut other = second.run(Ask::Read);
                    times_after(
                        n,
                        || {
                            second.run(Ask::Swap(other, other + 2));
                            other += 2;
                            Ok(())
                        },
                        || {
                            first.run(Ask::Swap(word, word + 2));
                            word += 2;
                            Ok(())
                        },
                    )?
                }
                "load" | "tcp load" => times(n, || side(name)[0].counter.load())?,
                "add" | "tcp add" => times(n, || side(name)[0].counter.fetch_add(1))?,
                "set" | "tcp set" => {
                    let [a, b] = side(name);
                    a.event.clear()?;
                    times_after(
                        n,
                        || b.event.clear().map(|_| ()),
                        || {
                            assert!(a.event.set()?, "it was clear");
                            Ok(())
                        },
                    )?
                }
                "clear after set" => {
                    let a = &fast[0];
                    times_after(
                        n,
                        || a.event.set().map(|_| ()),
                        || {
                            assert!(a.event.clear()?, "it was set");
                            Ok(())
                        },
                    )?
                }
                "bare reads, depth 16" => per_op(plan.streams * 8, 16, || {
                    first.stream(Ask::Read, 16, 16);
                    Ok(())
                })?,
                "loads, 16 in a batch" => per_op(plan.streams * 8, 16, || {
                    fast[0].loads16.run()?;
                    Ok(())
                })?,
                "bare reads" => per_op(plan.streams, BATCH, || {
                    first.stream(Ask::Read, bare::DEPTH as usize, BATCH);
                    Ok(())
                })?,
                "bare adds" => per_op(plan.streams, BATCH, || {
                    first.stream(Ask::Add, bare::DEPTH as usize, BATCH);
                    Ok(())
                })?,
                "loads" | "tcp loads" => per_op(plan.streams, BATCH, || {
                    side(name)[0].loads.run()?;
                    Ok(())
                })?,
                "adds" | "tcp adds" => per_op(plan.streams, BATCH, || {
                    side(name)[0].adds.run()?;
                    Ok(())
                })?,
                "wake" => fast_wake.times(&server, plan.wakes)?,
                "tcp wake" => slow_wake.times(&server, plan.wakes)?,
                other => return Err(format!("no series {other}").into()),
            };
            // The first round warms up.
            if round > 0 {
                samples[index].1.push(taken);
            }
        }
    }
    for side in &fast {
        let report = side._client.transport();
        if report.name != "rdma" {
            return Err(format!("RDMA was lost on the way: {report:?}").into());
        }
    }
    results.rows = ROWS.iter().map(|row| Compared::new(row, &samples)).collect();
    Ok(results)
}

const SERIES: [&str; 23] = [
    "bare read",
    "safe read",
    "load",
    "bare add",
    "safe add",
    "add",
    "bare cas",
    "bare cas in turns",
    "set",
    "clear after set",
    "bare reads, depth 16",
    "loads, 16 in a batch",
    "bare reads",
    "loads",
    "bare adds",
    "adds",
    "tcp load",
    "tcp add",
    "tcp set",
    "tcp loads",
    "tcp adds",
    "wake",
    "tcp wake",
];

/// A comparison of two series, and the most (or least) that the ratio should be.
struct Row {
    what: &'static str,
    ours: &'static str,
    base: &'static str,
    at_most: Option<f64>,
}

const fn row(
    what: &'static str,
    ours: &'static str,
    base: &'static str,
    at_most: Option<f64>,
) -> Row {
    Row { what, ours, base, at_most }
}

const ROWS: [Row; 17] = [
    row("load / READ", "load", "bare read", Some(1.10)),
    row("fetch_add / FETCH_ADD", "add", "bare add", Some(1.10)),
    row("fetch_add / CAS", "add", "bare cas", None),
    row("safe layer READ / READ", "safe read", "bare read", None),
    row("safe layer FETCH_ADD / FETCH_ADD", "safe add", "bare add", None),
    row("set, hand-off / CAS", "set", "bare cas in turns", Some(1.10)),
    row("clear, own set / CAS", "clear after set", "bare cas in turns", None),
    row("16 loads at once / READs", "loads, 16 in a batch", "bare reads, depth 16", None),
    row("1024 loads / READs, full depth", "loads", "bare reads", None),
    row("1024 fetch_adds / FETCH_ADDs", "adds", "bare adds", None),
    row("load, RDMA / TCP", "load", "tcp load", Some(1.0)),
    row("fetch_add, RDMA / TCP", "add", "tcp add", Some(1.0)),
    row("set, hand-off, RDMA / TCP", "set", "tcp set", Some(1.0)),
    row("wake-up, RDMA / TCP", "wake", "tcp wake", Some(1.0)),
    row("1024 loads, RDMA / TCP", "loads", "tcp loads", None),
    row("1024 fetch_adds, RDMA / TCP", "adds", "tcp adds", None),
    row("CAS / READ, bare", "bare cas", "bare read", None),
];

/// Nanoseconds of each of `n` calls.
fn times<T>(
    n: usize,
    mut op: impl FnMut() -> std::result::Result<T, farcell::Error>,
) -> Result<Vec<u64>> {
    times_after(n, || Ok(()), || op().map(drop))
}

/// The same for calls of the layer below.
fn times_of<T, E: std::error::Error + 'static>(
    n: usize,
    mut op: impl FnMut() -> std::result::Result<T, E>,
) -> Result<Vec<u64>> {
    let mut taken = Vec::with_capacity(n);
    for _ in 0..n {
        let begun = Instant::now();
        op()?;
        taken.push(begun.elapsed().as_nanos() as u64);
    }
    Ok(taken)
}

/// The same, with something before each call that is not timed.
fn times_after(
    n: usize,
    mut before: impl FnMut() -> std::result::Result<(), farcell::Error>,
    mut op: impl FnMut() -> std::result::Result<(), farcell::Error>,
) -> Result<Vec<u64>> {
    let mut taken = Vec::with_capacity(n);
    for _ in 0..n {
        before()?;
        let begun = Instant::now();
        op()?;
        taken.push(begun.elapsed().as_nanos() as u64);
    }
    Ok(taken)
}

/// Nanoseconds per operation of each of `n` calls that do `ops` operations.
fn per_op(
    n: usize,
    ops: usize,
    op: impl FnMut() -> std::result::Result<(), farcell::Error>,
) -> Result<Vec<u64>> {
    let mut op = op;
    let taken = times(n, &mut op)?;
    Ok(taken.into_iter().map(|ns| ns / ops as u64).collect())
}

/// What looking at the clock costs, in nanoseconds.
fn clock() -> u64 {
    let mut taken = times(1000, || Ok(())).unwrap_or_default();
    median(&mut taken)
}

/// A thread that waits for an event whenever it is told to, and says when its
/// wait returned.
struct Wake {
    event: Event,
    again: mpsc::Sender<()>,
    woken: mpsc::Receiver<Instant>,
    _client: Client,
}

impl Wake {
    fn start(server: &Server, choice: TransportChoice, cell: usize) -> Result<Wake> {
        let connect = || -> Result<Client> {
            Ok(Client::builder().addr(server.address()).key(key()?).transport(choice).connect()?)
        };
        let (setter, waiter) = (connect()?, connect()?);
        let event = setter.events("e", 1, 64)?.at(0, cell)?;
        let theirs = waiter.events("e", 1, 64)?.at(0, cell)?;
        let (again, told) = mpsc::channel();
        let (tell, woken) = mpsc::channel();
        std::thread::spawn(move || {
            let _client = waiter;
            while told.recv().is_ok() {
                let waited = theirs.wait();
                let now = Instant::now();
                if waited.is_err() || tell.send(now).is_err() {
                    return;
                }
            }
        });
        Ok(Wake { event, again, woken, _client: setter })
    }

    /// Nanoseconds from before the set to behind the return of the wait.
    fn times(&self, server: &Server, n: usize) -> Result<Vec<u64>> {
        let mut taken = Vec::with_capacity(n);
        for _ in 0..n {
            self.again.send(())?;
            while server.parked_waits() == 0 {
                std::thread::sleep(Duration::from_micros(200));
            }
            // So that the waiter really sleeps.
            std::thread::sleep(Duration::from_millis(1));
            let begun = Instant::now();
            self.event.set()?;
            let woken = self.woken.recv_timeout(Duration::from_secs(60))?;
            taken.push(woken.saturating_duration_since(begun).as_nanos() as u64);
            self.event.clear()?;
        }
        Ok(taken)
    }
}

// ---- what comes out ---------------------------------------------------------

struct Results {
    rows: Vec<Compared>,
    clock: u64,
    rounds: usize,
}

/// Medians over all rounds, and the ratio of the rounds' own medians.
struct Compared {
    row: &'static Row,
    ours_us: [f64; 2],
    base_us: [f64; 2],
    /// Lower quartile, median, upper quartile.
    ratio: [f64; 3],
}

impl Compared {
    fn new(row: &'static Row, samples: &[(&'static str, Vec<Vec<u64>>)]) -> Compared {
        let of = |name| samples.iter().find(|(n, _)| *n == name).map(|(_, s)| s.as_slice());
        let (ours, base) = (of(row.ours).unwrap_or_default(), of(row.base).unwrap_or_default());
        let mut ratios: Vec<f64> = ours
            .iter()
            .zip(base)
            .map(|(a, b)| {
                let (mut a, mut b) = (a.clone(), b.clone());
                median(&mut a) as f64 / median(&mut b).max(1) as f64
            })
            .collect();
        ratios.sort_by(f64::total_cmp);
        let at = |q: f64| quantile(&ratios, q);
        Compared {
            row,
            ours_us: middle(ours),
            base_us: middle(base),
            ratio: [at(0.25), at(0.5), at(0.75)],
        }
    }

    fn verdict(&self) -> &'static str {
        match self.row.at_most {
            None => "",
            Some(most) if self.ratio[1] <= most => "met",
            Some(_) => "MISSED",
        }
    }
}

/// Median and 99th percentile over all rounds, in microseconds.
fn middle(rounds: &[Vec<u64>]) -> [f64; 2] {
    let mut all: Vec<f64> = rounds.iter().flatten().map(|&ns| ns as f64 / 1000.0).collect();
    all.sort_by(f64::total_cmp);
    [quantile(&all, 0.5), quantile(&all, 0.99)]
}

fn median(values: &mut [u64]) -> u64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

fn quantile(sorted: &[f64], q: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * q).round() as usize).copied().unwrap_or(f64::NAN)
}

fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

impl Results {
    fn text(&self) -> String {
        let mut text = format!(
            "{} rounds; load average of this machine {}; looking at the clock costs {} ns\n\n",
            self.rounds,
            load_average(),
            self.clock
        );
        let _ = writeln!(
            text,
            "{:<32}{:>10}{:>10}{:>10}{:>10}  {:>6}  {:<13}{:>6}",
            "ours / base", "ours us", "p99", "base us", "p99", "ratio", "quartiles", "aim"
        );
        for c in &self.rows {
            let aim = c.row.at_most.map_or(String::new(), |most| format!("{most:.2}"));
            let quartiles = format!("{:.2}-{:.2}", c.ratio[0], c.ratio[2]);
            let _ = writeln!(
                text,
                "{:<32}{:>10.2}{:>10.2}{:>10.2}{:>10.2}  {:>6.2}  {:<13}{:>6} {}",
                c.row.what,
                c.ours_us[0],
                c.ours_us[1],
                c.base_us[0],
                c.base_us[1],
                c.ratio[1],
                quartiles,
                aim,
                c.verdict()
            );
        }
        text
    }

    fn json(&self) -> String {
        let rows: Vec<String> = self
            .rows
            .iter()
            .map(|c| {
                let aim = c.row.at_most.map_or("null".to_owned(), |most| most.to_string());
                format!(
                    "{{\"what\":\"{}\",\"ours_us\":{:.3},\"ours_p99_us\":{:.3},\"base_us\":{:.3},\"base_p99_us\":{:.3},\"ratio\":{:.4},\"ratio_q1\":{:.4},\"ratio_q3\":{:.4},\"at_most\":{aim}}}",
                    c.row.what,
                    c.ours_us[0],
                    c.ours_us[1],
                    c.base_us[0],
                    c.base_us[1],
                    c.ratio[1],
                    c.ratio[0],
                    c.ratio[2],
                )
            })
            .collect();
        format!(
            "{{\"rounds\":{},\"clock_ns\":{},\"load_average\":\"{}\",\"rows\":[{}]}}\n",
            self.rounds,
            self.clock,
            load_average(),
            rows.join(",")
        )
    }
}
