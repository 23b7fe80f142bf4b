//! A server under load: how far learners are held up by what others do to it, a
//! thousand active clients beside ten thousand idle ones, a million cells, a thousand
//! waiters that one set wakes, and a soak.
//!
//! `quiet` and `storm` phases alternate, so that both see the same machine; a ratio is
//! that of two neighbours. FARCELL_SOAK_SECONDS says how long the soak lasts (60).

#[path = "../common/mod.rs"]
mod common;
mod soak;
mod storm;
mod work;

use common::{
    Aim, Options, Part, Peer, Report, Result, Row, cores, farcell_client, farcell_server, list,
    monotonic_ns, part, play, quantile,
};
use std::time::{Duration, Instant};

/// What the rows are measured on: server and learners have one core, all others the other.
struct Place {
    ours: String,
    theirs: String,
    words: String,
}

fn main() -> Result<()> {
    match part() {
        Part::Driver(options) => drive(&options),
        Part::Peer(role, args) => {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            match (role.as_str(), &args[..]) {
                ("learners", [cores, server]) => work::learners(cores, server),
                ("active", [cores, server, count]) => work::active(cores, server, count.parse()?),
                ("idle", [cores, server, count]) => work::idle(cores, server, count.parse()?),
                ("waiters", [cores, server, count]) => work::waiters(cores, server, count.parse()?),
                ("large", [cores, cells]) => work::large_server(cores, cells.parse()?),
                ("storm", [cores, server, kind]) => storm::play(cores, server, kind),
                ("soak", [cores, server]) => soak::play(cores, server),
                _ => {
                    let args: Vec<String> = args.iter().map(|&a| a.to_owned()).collect();
                    match play(&role, &args)? {
                        true => Ok(()),
                        false => Err(format!("no role {role:?}").into()),
                    }
                }
            }
        }
    }
}

fn drive(options: &Options) -> Result<()> {
    let mut report = Report::new("load", options);
    work::raise_file_limit()?;
    let (a, b) = cores()?;
    let place = Place {
        ours: list(&[a]),
        theirs: list(&[b]),
        words: format!("server and learners on core {a}, the others on core {b}"),
    };
    for kind in storm::KINDS {
        if options.wants(kind) {
            storms(&mut report, options, &place, a, kind)?;
        }
    }
    if options.wants("active") {
        active(&mut report, options, &place, a)?;
    }
    if options.wants("cells") {
        million(&mut report, options, &place)?;
    }
    if options.wants("waiters") {
        waking(&mut report, options, &place, a)?;
    }
    if options.wants("soak") {
        soak::drive(&mut report, options, &place, a)?;
    }
    report.print()
}

/// The learners' p99 beside a storm, against that of the same learners without it.
fn storms(
    report: &mut Report,
    options: &Options,
    place: &Place,
    core: usize,
    kind: &str,
) -> Result<()> {
    let (rounds, phase) = if options.quick { (1, 200) } else { (7, 2000) };
    let server = farcell_server(&[core], false)?;
    let mut learners = Peer::start("learners", &[&place.ours, &server.addr])?;
    let mut storm = Peer::start("storm", &[&place.theirs, &server.addr, kind])?;
    let mut p99 = || -> Result<f64> {
        learners.say(&phase.to_string())?;
        Ok(learners.hear()?.parse()?)
    };
    let (mut quiet, mut beside, mut did) = (Vec::new(), Vec::new(), Vec::new());
    p99()?;
    for _ in 0..rounds {
        quiet.push(p99()?);
        storm.say("go")?;
        storm.hear()?;
        beside.push(p99()?);
        storm.say("stop")?;
        did.push(storm.hear()?);
        std::thread::sleep(Duration::from_millis(phase / 4));
    }
    report.note(format!("{kind}, in each storm: {}", did.join("; ")));
    report.add(Row {
        what: format!("p99 of learners' fetch_adds beside {kind}"),
        against: "without it".to_owned(),
        place: place.words.clone(),
        unit: "us",
        values: beside.iter().zip(&quiet).map(|(b, q)| b / q).collect(),
        limit: Some(quantile(&mut quiet, 0.5)),
        ours: quantile(&mut beside, 0.5),
        aim: Aim::AtMost(3.0),
    });
    Ok(())
}

/// A size or a time that is compared with nothing.
fn plain(what: String, place: &Place, unit: &'static str, mut values: Vec<f64>, aim: Aim) -> Row {
    let ours = quantile(&mut values.clone(), 0.5);
    values.sort_by(f64::total_cmp);
    let place = place.words.clone();
    Row { what, against: "-".to_owned(), place, unit, limit: None, ours, values, aim }
}

fn active(report: &mut Report, options: &Options, place: &Place, core: usize) -> Result<()> {
    let (idle, active, phase) = if options.quick { (100, 20, 200) } else { (10_000, 1_000, 5_000) };
    let server = farcell_server(&[core], false)?;
    let before = work::resident(server.id())?;
    let mut crowd = Peer::start("idle", &[&place.theirs, &server.addr, &idle.to_string()])?;
    crowd.hear()?;
    let mut busy = Peer::start("active", &[&place.theirs, &server.addr, &active.to_string()])?;
    busy.hear()?;
    let (mut rates, mut p99s) = (Vec::new(), Vec::new());
    for _ in 0..if options.quick { 1 } else { 5 } {
        busy.say(&phase.to_string())?;
        let line = busy.hear()?;
        let (rate, p99) = line.split_once(' ').ok_or("no rate")?;
        rates.push(rate.parse()?);
        p99s.push(p99.parse()?);
    }
    let each = (work::resident(server.id())? - before) / (idle + active) as f64;
    let who = format!("{active} active clients beside {idle} idle ones");
    report.add(plain(format!("{who}: adds a second"), place, "1/s", rates, Aim::None));
    report.add(plain(format!("{who}: p99"), place, "us", p99s, Aim::None));
    let what = format!("{who}: server's memory for each");
    report.add(plain(what, place, "B", vec![each], Aim::AtMost(2048.0)));
    Ok(())
}

/// A million cells against a thousand: what an operation on one of them takes.
fn million(report: &mut Report, options: &Options, place: &Place) -> Result<()> {
    let rows = if options.quick { 100 } else { 1000 };
    let server = Peer::start("large", &[&place.ours, "1100000"])?;
    let client = farcell_client(&server.addr)?.connect()?;
    let large = client.events("large", rows, 1000)?;
    let small = client.events("small", 1, 1000)?;
    let rounds = if options.quick { 3 } else { 21 };
    let mut seed = 1;
    let (mut ours, mut limit, mut whole) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let mut sample = |array: &farcell::EventArray, cells: u64| -> Result<f64> {
            let begun = Instant::now();
            for _ in 0..200 {
                let event = array.flat(work::random(&mut seed, cells) as usize)?;
                event.set()?;
                event.clear()?;
            }
            Ok(begun.elapsed().as_secs_f64() * 1e6 / 400.0)
        };
        limit.push(sample(&small, 1000)?);
        ours.push(sample(&large, rows as u64 * 1000)?);
        let begun = Instant::now();
        let set = large.snapshot()?.into_iter().filter(|&set| set).count();
        whole.push(begun.elapsed().as_secs_f64() * 1e3);
        if set != 0 {
            return Err(format!("{set} events are set").into());
        }
    }
    let cells = rows * 1000;
    report.add(Row {
        what: format!("an operation on one of {cells} cells"),
        against: "on one of 1,000".to_owned(),
        place: place.words.clone(),
        unit: "us",
        values: ours.iter().zip(&limit).map(|(o, l)| o / l).collect(),
        limit: Some(quantile(&mut limit, 0.5)),
        ours: quantile(&mut ours, 0.5),
        aim: Aim::AtMost(1.1),
    });
    report.add(plain(format!("snapshot of {cells} cells"), place, "ms", whole, Aim::None));
    Ok(())
}

/// From one set to the first and the last of many waiters, each a client of its own.
fn waking(report: &mut Report, options: &Options, place: &Place, core: usize) -> Result<()> {
    let count = if options.quick { 20 } else { 1000 };
    let server = farcell_server(&[core], false)?;
    let client = farcell_client(&server.addr)?.connect()?;
    let event = client.events("go", 1, 1)?.at(0, 0)?;
    let mut waiters = Peer::start("waiters", &[&place.theirs, &server.addr, &count.to_string()])?;
    waiters.hear()?;
    let mut times: [Vec<f64>; 2] = Default::default();
    for _ in 0..if options.quick { 2 } else { 21 } {
        waiters.say("wait")?;
        while client.open_events("go")?.all().waiters()?.first() != Some(&count) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let at = monotonic_ns();
        event.set()?;
        let line = waiters.hear()?;
        event.clear()?;
        for (times, ns) in times.iter_mut().zip(line.split(' ')) {
            times.push((ns.parse::<u64>()? - at) as f64 / 1e3);
        }
    }
    let [first, last] = times;
    report.add(plain(
        format!("the first of {count} waiters is woken"),
        place,
        "us",
        first,
        Aim::None,
    ));
    report.add(plain(
        format!("the last of {count} waiters is woken"),
        place,
        "us",
        last,
        Aim::None,
    ));
    Ok(())
}
