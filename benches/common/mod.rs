//! What the benches share: options, peer processes, bare servers, rows.
//!
//! A bench is one executable that plays all roles. Started by hand it is the
//! driver; it starts itself again for each peer, with the role and its
//! arguments behind `--role`. A peer says where it listens on its standard
//! output and lives until its standard input ends, so none outlives the
//! driver.

#![allow(dead_code)] // Each bench uses a part of it.

use farcell::{Client, ClientBuilder, Key, RdmaChoice, Server, TransportChoice};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use std::error::Error;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Anything that goes wrong ends the bench.
pub type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// How long a spinning side looks for more before it sleeps. Long against a
/// round trip, short against the pause between two rounds.
pub const SPIN: Duration = Duration::from_millis(1);

/// How a bench is to be run.
#[derive(Clone, Debug)]
pub struct Options {
    /// A few seconds, to see that the bench works. Its figures say nothing.
    pub quick: bool,
    /// The rows as JSON.
    pub json: bool,
    /// Only what has one of these in its description.
    only: Vec<String>,
}

impl Options {
    /// Whether to measure what is described so.
    pub fn wants(&self, what: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| what.contains(part))
    }
}

/// What this process is.
pub enum Part {
    /// The driver.
    Driver(Options),
    /// A peer: its role and the arguments behind it.
    Peer(String, Vec<String>),
}

/// Reads the command line: `--quick`, `--json`, and words that choose. `cargo bench` passes `--bench`; without it (`cargo
/// test --all-targets`) the bench is quick.
pub fn part() -> Part {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let Some(at) = args.iter().position(|a| a == "--role") {
        let mut rest = args.into_iter().skip(at + 1);
        let role = rest.next().unwrap_or_default();
        return Part::Peer(role, rest.collect());
    }
    let has = |name: &str| args.iter().any(|a| a == name);
    let quick = has("--quick") || !has("--bench");
    let json = has("--json");
    let only = args.into_iter().filter(|a| !a.starts_with('-')).collect();
    Part::Driver(Options { quick, json, only })
}

// ---- cores ------------------------------------------------------------------

/// The first two cores that this process may use; twice the same if there is
/// only one.
pub fn cores() -> Result<(usize, usize)> {
    let set = sched_getaffinity(None)?;
    let mut usable = (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core));
    let first = usable.next().ok_or("no core to run on")?;
    Ok((first, usable.next().unwrap_or(first)))
}

/// Keeps this thread, and those that it starts from now on, on these cores.
pub fn pin(cores: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    for &core in cores {
        set.set(core);
    }
    sched_setaffinity(None, &set)?;
    Ok(())
}

/// Cores as an argument of a peer.
pub fn list(cores: &[usize]) -> String {
    cores.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

fn pin_to_list(list: &str) -> Result<()> {
    pin(&list.split(',').map(str::parse).collect::<std::result::Result<Vec<usize>, _>>()?)
}

// ---- time -------------------------------------------------------------------

/// Nanoseconds of the monotonic clock, which all processes of a machine share.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// CPU time of all threads of a process, in nanoseconds; "self" is this one.
pub fn cpu_ns(process: &str) -> Result<u64> {
    let mut sum = 0;
    for task in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        sum += text.split_whitespace().next().ok_or("an empty schedstat")?.parse::<u64>()?;
    }
    Ok(sum)
}

// ---- peers ------------------------------------------------------------------

/// Another process of the bench.
pub struct Peer {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    /// What it said first: where it listens.
    pub addr: String,
}

impl Peer {
    /// Starts this executable in a role and waits until it is ready.
    pub fn start(role: &str, args: &[&str]) -> Result<Peer> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("--role")
            .arg(role)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().ok_or("a peer without an output")?);
        let mut peer = Peer { child, input, output, addr: String::new() };
        peer.addr = peer.hear()?;
        Ok(peer)
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// CPU time of all its threads, in nanoseconds.
    pub fn cpu_ns(&self) -> Result<u64> {
        cpu_ns(&self.child.id().to_string())
    }

    /// Says a line to it.
    pub fn say(&mut self, line: &str) -> Result<()> {
        let input = self.input.as_mut().ok_or("the peer has been dismissed")?;
        input.write_all(format!("{line}\n").as_bytes())?;
        Ok(())
    }

    /// The next line that it says.
    pub fn hear(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            return Err(format!("a peer has ended: {}", self.child.wait()?).into());
        }
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.input.take());
        let patience = Instant::now() + Duration::from_secs(5);
        while let Ok(None) = self.child.try_wait() {
            if Instant::now() > patience {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// In a peer: tells the driver where it listens.
pub fn ready(addr: &str) -> Result<()> {
    println!("{addr}");
    io::stdout().flush()?;
    Ok(())
}

/// In a peer: returns when the driver has gone or does not need us any more.
fn until_dismissed() -> Result<()> {
    io::copy(&mut io::stdin().lock(), &mut io::sink())?;
    Ok(())
}

/// In a peer: ends the process when the driver has gone.
fn end_when_dismissed() {
    std::thread::spawn(|| {
        let _ = until_dismissed();
        std::process::exit(0);
    });
}

/// The roles that several benches need. `false`: it is none of these.
pub fn play(role: &str, args: &[String]) -> Result<bool> {
    let arg = |i: usize| args.get(i).map(String::as_str).ok_or("a peer's argument is missing");
    match role {
        "farcell" => serve(arg(0)?, arg(1)?)?,
        "ping-pong" => {
            serve_ping_pong(arg(0)?, arg(1)? == "spin", arg(2)?.parse()?, arg(3)?.parse()?)?;
        }
        "echo" => serve_echo(arg(0)?, arg(1)?.parse()?, arg(2)?.parse()?)?,
        "acceptor" => serve_accept(arg(0)?)?,
        _ => return Ok(false),
    }
    Ok(true)
}

// ---- farcell ----------------------------------------------------------------

fn key() -> Result<Key> {
    Ok(Key::new(*b"the key of the benches")?)
}

/// A farcell server in a process of its own, with one worker.
pub fn farcell_server(cores: &[usize], spin: bool) -> Result<Peer> {
    Peer::start("farcell", &[&list(cores), if spin { "spin" } else { "sleep" }])
}

fn serve(cores: &str, spin: &str) -> Result<()> {
    pin_to_list(cores)?;
    let mut builder = Server::builder(key()?).rdma(RdmaChoice::Off).bind("127.0.0.1:0").workers(1);
    if spin == "spin" {
        builder = builder.spin(SPIN);
    }
    let server = builder.start()?;
    ready(&server.address())?;
    until_dismissed()
}

/// Settings for a client of such a server, over TCP.
pub fn farcell_client(addr: &str) -> Result<ClientBuilder> {
    Ok(Client::builder().addr(addr).key(key()?).transport(TransportChoice::Tcp))
}

// ---- the bare limits --------------------------------------------------------

/// A blocking (or busily polling) TCP server for one client at a time: reads
/// `request` bytes, writes `reply` bytes, and so on. Nothing can be answered
/// over TCP with less.
pub fn ping_pong_server(cores: &[usize], spin: bool, request: usize, reply: usize) -> Result<Peer> {
    let (request, reply) = (request.to_string(), reply.to_string());
    let spin = if spin { "spin" } else { "sleep" };
    Peer::start("ping-pong", &[&list(cores), spin, &request, &reply])
}

fn serve_ping_pong(cores: &str, spin: bool, request: usize, reply: usize) -> Result<()> {
    pin_to_list(cores)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    end_when_dismissed();
    ready(&listener.local_addr()?.to_string())?;
    loop {
        let mut bare = Bare::new(listener.accept()?.0, spin)?;
        let mut bytes = vec![0; request];
        let answer = vec![0; reply];
        while bare.read(&mut bytes).is_ok() && bare.write(&answer).is_ok() {}
    }
}

/// One side of a bare exchange.
pub struct Bare {
    stream: TcpStream,
    spin: bool,
}

impl Bare {
    /// A side that sleeps in read(2), or one that polls with it and sleeps
    /// only when nothing has come for [`SPIN`].
    pub fn new(stream: TcpStream, spin: bool) -> Result<Bare> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(spin)?;
        Ok(Bare { stream, spin })
    }

    /// Connects to a bare server.
    pub fn connect(addr: &str, spin: bool) -> Result<Bare> {
        Bare::new(TcpStream::connect(addr)?, spin)
    }

    /// Reads until the buffer is full.
    pub fn read(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        if !self.spin {
            return self.stream.read_exact(bytes);
        }
        let mut filled = 0;
        let mut misses = 0u32;
        let mut since = None;
        while filled < bytes.len() {
            match self.stream.read(&mut bytes[filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    misses += 1;
                    if misses.is_multiple_of(64)
                        && since.get_or_insert_with(Instant::now).elapsed() > SPIN
                    {
                        poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], None)?;
                    }
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Writes all of it.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        // Never more than a socket takes while its peer reads.
        self.stream.write_all(bytes)
    }
}

/// An epoll server on one thread that answers every `request` bytes by `reply`
/// bytes, for any number of clients.
pub fn echo_server(cores: &[usize], request: usize, reply: usize) -> Result<Peer> {
    Peer::start("echo", &[&list(cores), &request.to_string(), &reply.to_string()])
}

fn serve_echo(cores: &str, request: usize, reply: usize) -> Result<()> {
    struct One {
        stream: TcpStream,
        unanswered: usize,
    }
    pin_to_list(cores)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    end_when_dismissed();
    ready(&listener.local_addr()?.to_string())?;
    let poller = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&poller, listener.as_fd(), EventData::new_u64(u64::MAX), EventFlags::IN)?;
    let mut clients: Vec<Option<One>> = Vec::new();
    let mut events = Vec::with_capacity(1024);
    let mut bytes = vec![0; 256 << 10];
    let answers = vec![0; reply * 256];
    loop {
        events.clear();
        epoll::wait(&poller, rustix::buffer::spare_capacity(&mut events), None)?;
        for event in &events {
            let at = event.data.u64();
            if at == u64::MAX {
                let (stream, _) = listener.accept()?;
                stream.set_nodelay(true)?;
                let data = EventData::new_u64(clients.len() as u64);
                epoll::add(&poller, &stream, data, EventFlags::IN)?;
                clients.push(Some(One { stream, unanswered: 0 }));
                continue;
            }
            let Some(client) = &mut clients[at as usize] else {
                continue;
            };
            match client.stream.read(&mut bytes) {
                Ok(n) if n > 0 => {
                    client.unanswered += n;
                    let count = (client.unanswered / request).min(256);
                    client.unanswered -= count * request;
                    client.stream.write_all(&answers[..count * reply])?;
                }
                _ => clients[at as usize] = None,
            }
        }
    }
}

/// A server that accepts connections and does nothing with them, but to close
/// those that their client has closed.
pub fn acceptor(cores: &[usize]) -> Result<Peer> {
    Peer::start("acceptor", &[&list(cores)])
}

fn serve_accept(cores: &str) -> Result<()> {
    pin_to_list(cores)?;
    // As many as can wait, as the library does.
    let listener = TcpListener::bind("127.0.0.1:0")?;
    end_when_dismissed();
    ready(&listener.local_addr()?.to_string())?;
    let mut open: Vec<TcpStream> = Vec::new();
    loop {
        open.push(listener.accept()?.0);
        if open.len() >= 8192 {
            open.drain(..4096).for_each(drop);
        }
    }
}

// ---- figures ----------------------------------------------------------------

/// The value below which a part `q` of the values lies. Sorts them.
pub fn quantile(values: &mut [f64], q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (values.len().saturating_sub(1)) as f64 * q;
    values.get(at.round() as usize).copied().unwrap_or(f64::NAN)
}

/// What an aim demands of a ratio or a size.
#[derive(Clone, Copy, Debug)]
pub enum Aim {
    /// Not more.
    AtMost(f64),
    /// Not less.
    AtLeast(f64),
    /// Shown for orientation; nothing is demanded.
    None,
}

impl Aim {
    fn word(self, value: f64) -> &'static str {
        match self {
            Aim::AtMost(aim) if value <= aim => "met",
            Aim::AtLeast(aim) if value >= aim => "met",
            Aim::None => "-",
            _ => "missed",
        }
    }

    fn text(self) -> String {
        match self {
            Aim::AtMost(aim) => format!("<= {aim}"),
            Aim::AtLeast(aim) => format!(">= {aim}"),
            Aim::None => "-".to_owned(),
        }
    }
}

/// A line of the result.
pub struct Row {
    /// What was measured.
    pub what: String,
    /// What it was measured against.
    pub against: String,
    /// Where the processes ran.
    pub place: String,
    /// Of `limit` and `ours`.
    pub unit: &'static str,
    /// The median of the limit; none for a plain size.
    pub limit: Option<f64>,
    /// Our median.
    pub ours: f64,
    /// Ratios, ours to limit, of one pair of rounds each; or the sizes.
    pub values: Vec<f64>,
    /// What is demanded of their median.
    pub aim: Aim,
}

/// All lines of a bench.
pub struct Report {
    bench: &'static str,
    options: Options,
    machine: String,
    load: String,
    notes: Vec<String>,
    rows: Vec<Row>,
}

impl Report {
    /// An empty report.
    pub fn new(bench: &'static str, options: &Options) -> Report {
        Report {
            bench,
            options: options.clone(),
            // Before this process is pinned, which would change the count.
            machine: machine(),
            load: first_words("/proc/loadavg", 3),
            notes: Vec::new(),
            rows: Vec::new(),
        }
    }

    /// A sentence below the table.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Adds a line, and says on the terminal that it is done.
    pub fn add(&mut self, row: Row) {
        eprintln!("  {} ({}): done", row.what, row.place);
        self.rows.push(row);
    }

    /// Prints it. Quick figures are checked for sense alone.
    pub fn print(mut self) -> Result<()> {
        if self.rows.is_empty() {
            return Err("nothing has that in its description".into());
        }
        for row in &mut self.rows {
            let sense = row.ours > 0.0 && row.limit.is_none_or(|l| l > 0.0);
            if !sense || row.values.is_empty() || quantile(&mut row.values, 0.5).is_nan() {
                return Err(format!("{}: nothing was measured", row.what).into());
            }
        }
        if self.options.json {
            println!("{}", self.json());
        } else {
            print!("{}", self.table());
        }
        Ok(())
    }

    fn table(&mut self) -> String {
        let head =
            ["what", "limit p50", "ours p50", "ratio [p10..p90]", "aim", "", "where", "against"];
        let mut lines = vec![head.map(str::to_owned)];
        for row in &mut self.rows {
            let median = quantile(&mut row.values, 0.5);
            let ratio = if row.limit.is_some() {
                let (low, high) = (quantile(&mut row.values, 0.1), quantile(&mut row.values, 0.9));
                format!("{median:.3} [{low:.3}..{high:.3}]")
            } else {
                "-".to_owned()
            };
            lines.push([
                row.what.clone(),
                row.limit.map_or("-".to_owned(), |l| format!("{} {}", short(l), row.unit)),
                format!("{} {}", short(row.ours), row.unit),
                ratio,
                row.aim.text(),
                row.aim.word(median).to_owned(),
                row.place.clone(),
                row.against.clone(),
            ]);
        }
        let widths: Vec<usize> = (0..head.len())
            .map(|i| lines.iter().map(|line| line[i].chars().count()).max().unwrap_or(0))
            .collect();
        let mut text = format!("{}: {}\n", self.bench, self.machine);
        text += &format!("load at the start: {}", self.load);
        text += if self.options.quick { "; QUICK: the figures say nothing\n" } else { "\n" };
        for line in lines {
            let cells: Vec<String> =
                line.iter().zip(&widths).map(|(cell, &w)| format!("{cell:<w$}")).collect();
            text += cells.join("  ").trim_end();
            text.push('\n');
        }
        for note in &self.notes {
            text += &format!("{note}\n");
        }
        text
    }

    fn json(&mut self) -> String {
        let rows: Vec<String> = self
            .rows
            .iter_mut()
            .map(|row| {
                let [p10, median, p90] = [0.1, 0.5, 0.9].map(|q| quantile(&mut row.values, q));
                format!(
                    "{{\"what\":{},\"against\":{},\"where\":{},\"unit\":{},\"limit\":{},\"ours\":{},\
                     \"p10\":{p10:.4},\"median\":{median:.4},\"p90\":{p90:.4},\"rounds\":{},\"aim\":{},\"verdict\":{}}}",
                    quoted(&row.what),
                    quoted(&row.against),
                    quoted(&row.place),
                    quoted(row.unit),
                    row.limit.map_or("null".to_owned(), |l| format!("{l:.3}")),
                    format_args!("{:.3}", row.ours),
                    row.values.len(),
                    quoted(&row.aim.text()),
                    quoted(row.aim.word(median)),
                )
            })
            .collect();
        let notes: Vec<String> = self.notes.iter().map(|n| quoted(n)).collect();
        format!(
            "{{\"bench\":{},\"quick\":{},\"machine\":{},\"load\":{},\"rows\":[{}],\"notes\":[{}]}}",
            quoted(self.bench),
            self.options.quick,
            quoted(&self.machine),
            quoted(&self.load),
            rows.join(","),
            notes.join(","),
        )
    }
}

/// Three or four digits that count.
fn short(value: f64) -> String {
    match value {
        v if v >= 1000.0 => format!("{v:.0}"),
        v if v >= 100.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

fn first_words(path: &str, n: usize) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().take(n).collect::<Vec<_>>().join(" ")
}

/// Kernel and CPU.
pub fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or("an unknown CPU", |(_, model)| model.trim());
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let virt = if info.contains(" hypervisor") { ", a virtual machine" } else { "" };
    let kernel = first_words("/proc/sys/kernel/osrelease", 1);
    format!("Linux {kernel}, {count} cores of {model}{virt}")
}
