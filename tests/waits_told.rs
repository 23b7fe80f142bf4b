//! Waits without a thread: whatever becomes of one is told once, and hundreds
//! of them need one thread.

mod common;

use common::eventually;
use farcell::{Canceller, Client, Error, Key, Server};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(10);

fn server() -> Server {
    common::server().start().unwrap()
}

fn client(server: &Server) -> Client {
    common::client(server).connect().unwrap()
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn hundreds_need_one_thread_and_each_is_told_once() {
    let server = server();
    let waiting = client(&server);
    let events = waiting.events("many", 1, 300).unwrap();
    let before = threads();
    let (tell, told) = mpsc::channel();
    for col in 0..300 {
        let tell = tell.clone();
        let ended = move |result: farcell::Result<()>| tell.send((col, result.is_ok())).unwrap();
        events.at(0, col).unwrap().wait_then(ended).unwrap();
    }
    // The server's own threads were there before; other tests start theirs.
    assert!(threads() < before + 50, "{before} threads became {}", threads());
    assert!(told.recv_timeout(Duration::from_millis(100)).is_err());
    let setting = client(&server);
    setting.events("many", 1, 300).unwrap().set_all().unwrap();
    let mut seen: Vec<usize> = (0..300)
        .map(|_| {
            let (col, satisfied) = told.recv_timeout(SOON).unwrap();
            assert!(satisfied);
            col
        })
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..300).collect::<Vec<_>>());
    assert!(told.recv_timeout(Duration::from_millis(100)).is_err());
    eventually("nothing is parked", || server.parked_waits() == 0);
}

#[test]
fn other_operations_and_waits_go_on_meanwhile() {
    let server = server();
    let client = client(&server);
    let events = client.events("e", 1, 4).unwrap();
    let (tell, told) = mpsc::channel();
    let pending = events.at(0, 0).unwrap();
    pending.wait_then(move |result| tell.send(result).unwrap()).unwrap();
    std::thread::scope(|s| {
        for col in 1..4 {
            let event = events.at(0, col).unwrap();
            s.spawn(move || {
                for _ in 0..50 {
                    event.set().unwrap();
                    event.wait().unwrap();
                    event.clear().unwrap();
                }
            });
        }
    });
    pending.set().unwrap();
    told.recv_timeout(SOON).unwrap().unwrap();
}

#[test]
fn a_cancelled_one_is_told_so_and_leaves_nothing() {
    let server = server();
    let client = client(&server);
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    let (tell, told) = mpsc::channel();
    let pending = event.wait_then(move |result| tell.send(result).unwrap()).unwrap();
    pending.cancel();
    assert!(matches!(told.recv_timeout(SOON), Ok(Err(Error::Cancelled))));
    pending.cancel();
    eventually("nothing is parked", || server.parked_waits() == 0);
}

#[test]
fn what_is_set_already_and_many_cells() {
    let server = server();
    let client = client(&server);
    let events = client.events("e", 2, 3).unwrap();
    events.at(1, 2).unwrap().set().unwrap();
    let (tell, told) = mpsc::channel();
    let any = events.column(2).unwrap();
    any.wait_then(1, move |woken| tell.send(woken).unwrap()).unwrap();
    let woken = told.recv_timeout(SOON).unwrap().unwrap();
    assert_eq!((woken.cells()[0].row, woken.cells()[0].col), (1, 2));
    let (tell, told) = mpsc::channel();
    events.all().wait_then(6, move |woken| tell.send(woken).unwrap()).unwrap();
    assert!(told.recv_timeout(Duration::from_millis(100)).is_err());
    events.set_all().unwrap();
    assert!(told.recv_timeout(SOON).unwrap().unwrap().is_satisfied());
}

#[test]
fn closing_and_a_server_that_stops_are_told() {
    let server = server();
    let closing = client(&server);
    let event = closing.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    let (tell, told) = mpsc::channel();
    event.wait_then(move |result| tell.send(result).unwrap()).unwrap();
    closing.close();
    assert!(matches!(told.recv_timeout(SOON), Ok(Err(Error::Closed))));
    assert!(matches!(event.wait_then(|_| {}), Err(Error::Closed)));

    let client = client(&server);
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    let (tell, told) = mpsc::channel();
    event.wait_then(move |result| tell.send(result).unwrap()).unwrap();
    server.stop().unwrap();
    assert!(matches!(told.recv_timeout(SOON), Ok(Err(Error::ServerGoingAway { .. }))));
}

#[test]
fn a_canceller_asks_the_waiting_thread_and_misses_nothing() {
    let server = server();
    let client = client(&server);
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let (count, halt) = (asked.clone(), stop.clone());
    let me = std::thread::current().id();
    let watched = Canceller::watched(Duration::from_millis(5), move || {
        assert_eq!(std::thread::current().id(), me);
        count.fetch_add(1, Ordering::Relaxed);
        halt.load(Ordering::Relaxed)
    });
    assert!(!event.wait_with(Some(Duration::from_millis(100)), Some(&watched)).unwrap());
    assert!(asked.load(Ordering::Relaxed) >= 5);
    // A pulse between two questions ends the wait.
    let pulse = event.clone();
    let pulsing = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(60));
        pulse.set().unwrap();
        pulse.clear().unwrap();
    });
    assert!(event.wait_with(Some(SOON), Some(&watched)).unwrap());
    pulsing.join().unwrap();
    stop.store(true, Ordering::Relaxed);
    let begun = Instant::now();
    assert!(matches!(event.wait_with(None, Some(&watched)), Err(Error::Cancelled)));
    assert!(begun.elapsed() < Duration::from_secs(1));
    eventually("nothing is parked", || server.parked_waits() == 0);
}

#[test]
fn another_jobs_client_is_refused_though_it_knows_the_key() {
    let key = Key::new(*b"the same key for both jobs").unwrap();
    let server = Server::builder(key.clone()).bind("127.0.0.1:0").job("run 1").start().unwrap();
    let of =
        |job: &str| Client::builder().addr(server.address()).key(key.clone()).job(job).connect();
    of("run 1").unwrap();
    of("").unwrap();
    let error = of("run 2").unwrap_err();
    assert!(matches!(&error, Error::OtherJob { job, .. } if job == "run 2"), "{error}");
    assert!(error.is_refusal());
}
