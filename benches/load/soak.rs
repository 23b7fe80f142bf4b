//! A soak: everything that clients do, over and over, and what the server's memory does
//! meanwhile.

use super::Place;
use super::common::{
    Aim, Options, Peer, Report, Result, Row, farcell_client, farcell_server, quantile, ready,
};
use super::work::{commands, pin_to, random, resident};
use farcell::Client;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const THREADS: u64 = 4;

/// Clients come and go, make arrays and remove them, change, wait, lock and write.
/// Any line ends it, answered by how many rounds there were.
pub fn play(cores: &str, server: &str) -> Result<()> {
    pin_to(cores)?;
    ready("")?;
    let (over, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|s| -> Result<()> {
        let threads: Vec<_> = (0..THREADS)
            .map(|me| {
                let (over, rounds) = (&over, &rounds);
                s.spawn(move || -> farcell::Result<()> {
                    let mut seed = me;
                    while !over.load(Relaxed) {
                        let Ok(builder) = farcell_client(server) else { return Ok(()) };
                        let client = builder.connect()?;
                        for _ in 0..50 {
                            round(&client, me, &mut seed)?;
                            rounds.fetch_add(1, Relaxed);
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        commands().next().transpose()?;
        over.store(true, Relaxed);
        for thread in threads {
            thread.join().map_err(|_| "a thread panicked")??;
        }
        Ok(())
    })?;
    ready(&rounds.load(Relaxed).to_string())
}

fn round(client: &Client, me: u64, seed: &mut u64) -> farcell::Result<()> {
    let name = format!("own.{me}.{}", random(seed, 100));
    let own = client.events(&name, 1 + random(seed, 20) as usize, 7)?;
    let event = own.at(0, 3)?;
    event.set()?;
    event.take()?;
    event.wait_timeout(Duration::from_micros(100))?;
    client.remove(&name)?;
    client.counters("sum", 1, 1)?.at(0, 0)?.fetch_add(1)?;
    drop(client.locks("lock", 1, 1)?.at(0, 0)?.lock()?);
    let slots = client.slots("messages", THREADS as usize, 64 << 10)?;
    slots.at(me as usize)?.write(&vec![me as u8; random(seed, 64 << 10) as usize])?;
    client.events("all", 64, 64)?.snapshot()?;
    Ok(())
}

/// Memory of the server in the last quarter against that in the second one.
pub fn drive(report: &mut Report, options: &Options, place: &Place, core: usize) -> Result<()> {
    let asked = std::env::var("FARCELL_SOAK_SECONDS").ok().map(|s| s.parse()).transpose()?;
    let seconds: u64 = asked.unwrap_or(if options.quick { 1 } else { 60 });
    let server = farcell_server(&[core], false)?;
    let mut clients = Peer::start("soak", &[&place.theirs, &server.addr])?;
    let (begun, mut samples) = (Instant::now(), Vec::new());
    while begun.elapsed() < Duration::from_secs(seconds) {
        samples.push(resident(server.id())?);
        std::thread::sleep(Duration::from_millis(50));
    }
    clients.say("stop")?;
    let rounds = clients.hear()?;
    let quarter = samples.len() / 4;
    let mut early = samples[quarter..2 * quarter].to_vec();
    let mut late = samples[3 * quarter..].to_vec();
    report.note(format!("The soak made {rounds} rounds."));
    report.add(Row {
        what: format!("server's memory in the last quarter of {seconds} s of soak"),
        against: "in the second quarter".to_owned(),
        place: place.words.clone(),
        unit: "B",
        limit: Some(quantile(&mut early, 0.5)),
        ours: quantile(&mut late, 0.5),
        values: vec![quantile(&mut late, 0.5) / quantile(&mut early, 0.5)],
        aim: Aim::AtMost(1.02),
    });
    Ok(())
}
