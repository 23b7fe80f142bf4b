//! `farcell bench`

use crate::connection::Connection;
use crate::failure::{Answer, Failure};
use crate::output::{Output, table};
use crate::signals;
use farcell::{Batch, Client, Counter, Error, Event, TransportChoice};
use hdrhistogram::Histogram;
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of a cell: what every operation moves.
const BYTES: usize = 8;
/// Requests under way together, for the message rate.
const DEPTHS: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// The transports take turns this often, so that what else happens on the
/// machines and between them hits all alike.
const TURNS: usize = 20;
/// The longest time that is told apart, in nanoseconds: ten minutes.
const MOST: u64 = 600_000_000_000;
/// Longer than any wait that somebody ends.
const LONG: Duration = Duration::from_secs(1);

/// Measure what operations cost on your machines and network.
///
/// Times single operations, from call to return, and the rate at which many go
/// through, over each transport that there is, in turns. Works on arrays of its
/// own, which are removed at the end.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  farcell bench node0:7117
  farcell bench node0:7117 --transport rdma --iterations 100000 --json

is_set    looks at an event
set       sets it, after another client has cleared it (untimed), in turns
clear     clears it, after another client has set it
fetch_add adds to a counter
wake-up   from the call of set until the wait of another client has returned

One operation at a time; typical is the median. The message rate is that of
batches of as many operations as depth says.

JSON: {\"addr\", \"transports\": [{\"name\", \"what\"}], \"missing\": [{\"name\", \"why\"}],
\"latency\": [{\"operation\", \"transport\", \"bytes\", \"iterations\", \"min_us\",
\"typical_us\", \"average_us\", \"p99_us\", \"p99_9_us\"}], \"rate\": [{\"operation\",
\"transport\", \"depth\", \"per_second\"}]}

Exit codes: 0 done, 2 usage, 3 unreachable, 4 refused, 5 any other failure, such
as a transport that was asked for and is not there; 130 after Ctrl-C")]
pub struct Bench {
    /// The server; goes before --addr
    #[arg(value_name = "HOST:PORT")]
    server: Option<String>,
    /// Operations of each kind; a tenth of it for wake-ups
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1000,
        value_parser = clap::value_parser!(u32).range(20..=100_000_000))]
    iterations: u32,
}

#[derive(Serialize)]
struct Report {
    addr: String,
    transports: Vec<Present>,
    missing: Vec<Missing>,
    latency: Vec<Latency>,
    rate: Vec<Rate>,
}

#[derive(Serialize)]
struct Present {
    name: &'static str,
    what: String,
}

#[derive(Serialize)]
struct Missing {
    name: &'static str,
    why: String,
}

#[derive(Serialize)]
struct Latency {
    operation: &'static str,
    transport: &'static str,
    bytes: usize,
    iterations: u64,
    min_us: f64,
    typical_us: f64,
    average_us: f64,
    p99_us: f64,
    p99_9_us: f64,
}

#[derive(Serialize)]
struct Rate {
    operation: &'static str,
    transport: &'static str,
    depth: usize,
    per_second: f64,
}

impl Bench {
    /// Runs the command.
    pub fn run(self, connection: &Connection, out: &Output) -> Result<Answer, Failure> {
        let stop = Arc::new(AtomicI32::new(0));
        let asked = stop.clone();
        // Release: nothing else travels with it.
        signals::on_end(move |signal| asked.store(signal, Ordering::Release))?;
        let addr = match &self.server {
            Some(addr) => addr.clone(),
            None => connection.addr()?,
        };
        let wanted = connection.transport()?;
        let builder = connection.builder()?.addr(&addr);
        let connect = |choice| builder.clone().transport(choice).connect();
        let arrays = Arrays::make(connect(TransportChoice::Tcp)?)?;
        let mut report = Report {
            addr: addr.clone(),
            transports: Vec::new(),
            missing: Vec::new(),
            latency: Vec::new(),
            rate: Vec::new(),
        };
        let mut lines = Vec::new();
        let ways = [
            ("shm", TransportChoice::Shm),
            ("rdma", TransportChoice::Rdma),
            ("tcp", TransportChoice::Tcp),
        ];
        for (row, (name, choice)) in ways.into_iter().enumerate() {
            if wanted.is_some_and(|wanted| wanted != choice) {
                continue;
            }
            match Line::new(name, row, &arrays, || connect(choice)) {
                Ok(line) => {
                    // Of TCP there is nothing to tell.
                    let reasons = line.client.transport().reasons;
                    let what = if name == "tcp" { String::new() } else { reasons.join("; ") };
                    report.transports.push(Present { name, what });
                    lines.push(line);
                }
                Err(Error::Rdma { what: why } | Error::Shm { why }) if wanted.is_none() => {
                    report.missing.push(Missing { name, why });
                }
                Err(error) => return Err(error.into()),
            }
        }
        let measured = measure(self.iterations, &stop, &mut lines);
        // Threads that wait first, then what they wait for.
        let ended: Vec<_> = lines.into_iter().map(Line::end).collect();
        drop(arrays);
        if let signal @ 1.. = stop.load(Ordering::Acquire) {
            return Err(Failure::Interrupted(signal));
        }
        measured?;
        for line in ended {
            report.latency.extend(line.latency);
            report.rate.extend(line.rate);
        }
        out.print(text(&report), &report)?;
        Ok(Answer::Yes)
    }
}

/// Arrays that nobody else has. They are removed when this is dropped.
struct Arrays {
    client: Client,
    events: String,
    counters: String,
}

/// Columns of the events.
const SINGLE: usize = 0;
const WAKE: usize = 1;

impl Arrays {
    fn make(client: Client) -> Result<Arrays, Failure> {
        let mut random = [0; 8];
        getrandom::fill(&mut random)
            .map_err(|e| Failure::Other(format!("no random numbers for a name: {e}")))?;
        let name = |what| {
            let (pid, random) = (std::process::id(), u64::from_ne_bytes(random));
            format!("bench.{pid}.{random:016x}.{what}")
        };
        let arrays = Arrays { client, events: name("events"), counters: name("counters") };
        // From here on they are removed if something fails.
        arrays.client.events(&arrays.events, 3, 2)?;
        arrays.client.counters(&arrays.counters, 3, DEPTHS[DEPTHS.len() - 1])?;
        Ok(arrays)
    }
}

impl Drop for Arrays {
    fn drop(&mut self) {
        for name in [&self.events, &self.counters] {
            // Where they cannot be removed there is no server any more, or
            // they were never made.
            let _ = self.client.remove(name);
        }
    }
}

/// One transport: two clients, and what was measured between them.
struct Line {
    name: &'static str,
    client: Client,
    _other: Client,
    /// The same event, of one client and of the other one.
    event: [Event; 2],
    counter: Counter,
    waiter: Waiter,
    batches: Vec<(&'static str, usize, Batch)>,
    times: Vec<(&'static str, Histogram<u64>)>,
    /// Operations and their time, one for each batch.
    streams: Vec<(u64, Duration)>,
}

/// What was measured over one transport.
struct Measured {
    latency: Vec<Latency>,
    rate: Vec<Rate>,
}

const OPERATIONS: [&str; 5] = ["is_set", "set", "clear", "fetch_add", "wake-up"];

impl Line {
    fn new(
        name: &'static str,
        row: usize,
        arrays: &Arrays,
        connect: impl Fn() -> Result<Client, Error>,
    ) -> Result<Line, Error> {
        let (client, other) = (connect()?, connect()?);
        let [mine, theirs] = [&client, &other].map(|c| c.open_events(&arrays.events));
        let (mine, theirs) = (mine?, theirs?);
        let counters = client.open_counters(&arrays.counters)?;
        let cells: Vec<Counter> =
            (0..counters.cols()).map(|col| counters.at(row, col)).collect::<Result<_, _>>()?;
        let mut batches = Vec::new();
        for depth in DEPTHS {
            let (mut loads, mut adds) = (client.batch(), client.batch());
            for cell in &cells[..depth] {
                loads.load(cell);
                adds.fetch_add(cell, 1);
            }
            batches.push(("load", depth, loads));
            batches.push(("fetch_add", depth, adds));
        }
        let waiter =
            Waiter::start(mine.at(row, WAKE)?, theirs.at(row, WAKE)?, mine.cells(&[(row, WAKE)])?)?;
        Ok(Line {
            name,
            event: [mine.at(row, SINGLE)?, theirs.at(row, SINGLE)?],
            counter: cells[0].clone(),
            waiter,
            streams: vec![(0, Duration::ZERO); batches.len()],
            batches,
            times: Vec::new(),
            client,
            _other: other,
        })
    }

    /// A turn: some of each single operation.
    fn single(&mut self, n: u32, go_on: &impl Fn() -> Result<(), Failure>) -> Result<(), Failure> {
        let [mine, theirs] = &self.event;
        let counter = &self.counter;
        for _ in 0..n {
            go_on()?;
            record(&mut self.times[0].1, || mine.is_set())?;
        }
        // Without a look in between, which would tell what the other one did.
        for _ in 0..n {
            go_on()?;
            record(&mut self.times[1].1, || mine.set())?;
            record(&mut self.times[2].1, || theirs.clear())?;
        }
        for _ in 0..n {
            go_on()?;
            record(&mut self.times[3].1, || counter.fetch_add(1))?;
        }
        for _ in 0..n.div_ceil(10) {
            go_on()?;
            let taken = self.waiter.time()?;
            self.times[4].1.saturating_record(nanos(taken));
        }
        Ok(())
    }

    /// A turn: about so many operations of each batch.
    fn many(&mut self, n: u32, go_on: &impl Fn() -> Result<(), Failure>) -> Result<(), Failure> {
        for ((_, depth, batch), (done, time)) in self.batches.iter().zip(&mut self.streams) {
            let runs = (n as usize).div_ceil(*depth);
            let begun = Instant::now();
            for _ in 0..runs {
                go_on()?;
                batch.run()?;
            }
            *time += begun.elapsed();
            *done += (runs * depth) as u64;
        }
        Ok(())
    }

    fn end(self) -> Measured {
        self.waiter.end();
        let transport = self.name;
        let us = |ns: u64| (ns as f64 / 10.0).round() / 100.0;
        let latency = self.times.iter().map(|(operation, times)| Latency {
            operation,
            transport,
            bytes: BYTES,
            iterations: times.len(),
            min_us: us(times.min()),
            typical_us: us(times.value_at_quantile(0.5)),
            average_us: us(times.mean().round() as u64),
            p99_us: us(times.value_at_quantile(0.99)),
            p99_9_us: us(times.value_at_quantile(0.999)),
        });
        let rate =
            self.batches.iter().zip(&self.streams).map(|((operation, depth, _), (done, time))| {
                Rate {
                    operation,
                    transport,
                    depth: *depth,
                    per_second: (*done as f64 / time.as_secs_f64().max(1e-9)).round(),
                }
            });
        Measured { latency: latency.collect(), rate: rate.collect() }
    }
}

/// Measures all lines in turns.
fn measure(iterations: u32, stop: &AtomicI32, lines: &mut [Line]) -> Result<(), Failure> {
    let go_on = || match stop.load(Ordering::Acquire) {
        0 => Ok(()),
        signal => Err(Failure::Interrupted(signal)),
    };
    // What is first is slower: nothing of it counts.
    for line in lines.iter_mut() {
        line.times = histograms()?;
        line.single(10, &go_on)?;
        line.many(16, &go_on)?;
        line.times = histograms()?;
        line.streams.fill((0, Duration::ZERO));
    }
    let turn = iterations.div_ceil(TURNS as u32);
    for _ in 0..TURNS {
        for line in lines.iter_mut() {
            line.single(turn, &go_on)?;
            line.many(turn, &go_on)?;
        }
    }
    match lines.iter().find(|line| line.client.transport().name != line.name) {
        None => Ok(()),
        Some(line) => Err(Failure::Other(format!(
            "{} was lost while it was measured: {}",
            line.name,
            line.client.transport().reasons.join("; ")
        ))),
    }
}

fn histograms() -> Result<Vec<(&'static str, Histogram<u64>)>, Failure> {
    OPERATIONS
        .iter()
        .map(|operation| {
            let histogram = Histogram::new_with_bounds(1, MOST, 3)
                .map_err(|e| Failure::Other(format!("no histogram: {e}")))?;
            Ok((*operation, histogram))
        })
        .collect()
}

fn record<T>(
    times: &mut Histogram<u64>,
    operation: impl FnOnce() -> Result<T, Error>,
) -> Result<(), Failure> {
    let begun = Instant::now();
    operation()?;
    times.saturating_record(nanos(begun.elapsed()));
    Ok(())
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1)
}

/// A thread that waits for an event whenever it is told to.
struct Waiter {
    event: Event,
    parked: farcell::Events,
    tell: Sender<()>,
    woken: Receiver<Result<Instant, Error>>,
    thread: JoinHandle<()>,
}

impl Waiter {
    /// `event` and `theirs` are the same, of two clients.
    fn start(event: Event, theirs: Event, parked: farcell::Events) -> Result<Waiter, Error> {
        let (tell, told) = mpsc::channel();
        let (say, woken) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            while told.recv().is_ok() {
                // For a second at most, so that it ends when nobody sets it.
                let waited = theirs.wait_timeout(LONG);
                if say.send(waited.map(|_| Instant::now())).is_err() {
                    return;
                }
            }
        });
        Ok(Waiter { event, parked, tell, woken, thread })
    }

    /// From before the set until the other client's wait has returned.
    fn time(&self) -> Result<Duration, Failure> {
        let gone = |_| Failure::Other("the thread that waits has ended".to_owned());
        loop {
            self.tell.send(()).map_err(|e| gone(e.to_string()))?;
            let mut parked = false;
            let begun = Instant::now();
            while !parked && begun.elapsed() < LONG / 2 {
                parked = self.parked.waiters()? == [1];
            }
            let begun = Instant::now();
            self.event.set()?;
            let woken = self.woken.recv().map_err(|e| gone(e.to_string()))??;
            self.event.clear()?;
            // Otherwise it has not slept, which measures something else.
            if parked {
                return Ok(woken.saturating_duration_since(begun));
            }
        }
    }

    fn end(self) {
        drop(self.tell);
        // A panic there has been told already.
        let _ = self.thread.join();
    }
}

/// For a person.
fn text(report: &Report) -> String {
    let mut text = format!("server {}\n", report.addr);
    for Present { name, what } in &report.transports {
        text.push_str(&match what.as_str() {
            "" => format!("{name}\n"),
            what => format!("{name}: {what}\n"),
        });
    }
    for Missing { name, why } in &report.missing {
        text.push_str(&format!("{name}: not measured, {why}\n"));
    }
    let head = [
        "operation",
        "transport",
        "bytes",
        "iterations",
        "min us",
        "typical us",
        "average us",
        "99 % us",
        "99.9 % us",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for operation in OPERATIONS {
        for l in report.latency.iter().filter(|l| l.operation == operation) {
            let mut row = vec![operation.to_owned(), l.transport.to_owned()];
            row.extend([l.bytes.to_string(), l.iterations.to_string()]);
            let times = [l.min_us, l.typical_us, l.average_us, l.p99_us, l.p99_9_us];
            row.extend(times.map(|us| format!("{us:.2}")));
            rows.push(row);
        }
    }
    text.push('\n');
    text.push_str(&table(&rows, 2));
    let columns: Vec<(&str, &str)> = ["load", "fetch_add"]
        .iter()
        .flat_map(|op| report.transports.iter().map(move |t| (*op, t.name)))
        .collect();
    let mut head = vec!["depth".to_owned()];
    head.extend(columns.iter().map(|(op, transport)| format!("{op}/s {transport}")));
    let mut rows = vec![head];
    for depth in DEPTHS {
        let mut row = vec![depth.to_string()];
        row.extend(columns.iter().map(|(op, transport)| {
            let here =
                |r: &&Rate| r.depth == depth && r.operation == *op && r.transport == *transport;
            report.rate.iter().find(here).map_or(String::new(), |r| format!("{:.0}", r.per_second))
        }));
        rows.push(row);
    }
    text.push('\n');
    text.push_str(&table(&rows, 0));
    text
}
