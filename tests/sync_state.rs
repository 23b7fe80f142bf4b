//! Promise: a server that is killed and comes back with its state has the
//! sessions that it had. Whoever comes back within a lease holds what it held,
//! and waits where it waited; whoever does not is lost as any other.
#![cfg(feature = "cli")]

mod common;
use common::another::{Another, role};
use common::process::Process;
use common::{eventually, key};
use farcell::{Client, Error, Parted, TransportChoice, WaitOptions};
use std::time::{Duration, Instant};

/// What a client process is to do: the server's address.
const ROLE: &str = "FARCELL_SYNC_STATE_CLIENT";
const LEASE: Duration = Duration::from_secs(2);

fn client(server: &Process) -> Client {
    Client::builder().addr(&server.addr).key(key()).connect().unwrap()
}

fn state() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let state = dir.path().join("state").to_str().unwrap().to_owned();
    (dir, state)
}

#[test]
fn what_was_held_is_held_and_who_waited_waits() {
    let (_dir, state) = state();
    let mut server = Process::start(&["--state", &state]);
    let (a, b, c) = (client(&server), client(&server), client(&server));
    let seats = [a.seat(), b.seat(), c.seat()];
    a.join("rank 0").unwrap();
    let lock = |of: &Client| of.locks("l", 1, 2).unwrap().at(0, 1).unwrap();
    let barrier = |of: &Client| of.barriers("b", 1, 2, 2).unwrap().at(0, 1).unwrap();
    let guard = lock(&a).lock().unwrap();
    let semaphore = a.semaphores("s", 1, 1, 3, 4).unwrap().at(0, 0).unwrap();
    semaphore.acquire().unwrap();
    std::thread::scope(|s| {
        s.spawn(|| barrier(&b).wait().unwrap());
        assert_eq!(barrier(&a).wait().unwrap().generation(), 0);
    });
    std::thread::scope(|s| {
        let queued = s.spawn(|| {
            let guard = lock(&b).lock().unwrap();
            let told = (guard.token(), guard.was_abandoned());
            guard.unlock().unwrap();
            told
        });
        let waiter = s.spawn(|| barrier(&c).wait());
        eventually("two wait", || a.info().unwrap().parked_waits == 2);
        for _ in 0..3 {
            server.kill();
            server.start_again();
            eventually("two wait again", || a.info().unwrap().parked_waits == 2);
            guard.check().unwrap();
            assert!(lock(&c).try_lock().unwrap().is_none());
        }
        assert_eq!([a.seat(), b.seat(), c.seat()], seats, "each has the seat that it had");
        let named = a.members().unwrap().into_iter().find(|m| m.seat == seats[0]).unwrap();
        assert_eq!(named.name.as_deref(), Some("rank 0"));
        guard.unlock().unwrap();
        assert_eq!(queued.join().unwrap(), (2, false));
        let last = barrier(&a).wait().unwrap();
        assert!(last.is_last() && last.generation() == 1, "{last:?}");
        let first = waiter.join().unwrap().unwrap();
        assert_eq!((first.index(), first.generation()), (0, 1));
    });
    assert_eq!(semaphore.available().unwrap(), 2);
    let new = client(&server);
    assert!(new.seat() > seats[2], "a new session has no seat that another had before it");
}

#[test]
#[ignore = "the role of a client process of the tests below"]
fn role_of_a_client() {
    let Ok(addr) = std::env::var(ROLE) else { return };
    let client = Client::builder().addr(addr).key(key()).connect().unwrap();
    client.join("rank 1").unwrap();
    let told = client.events("e", 1, 2).unwrap();
    let mut will = client.batch();
    will.set(&told.at(0, 1).unwrap());
    client.set_will(&will).unwrap();
    let _guard = client.locks("l", 1, 2).unwrap().at(0, 1).unwrap().lock().unwrap();
    let barrier = client.barriers("b", 1, 1, 2).unwrap().at(0, 0).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| barrier.wait());
        eventually("it waits", || barrier.n_waiting().unwrap() == 1);
        told.at(0, 0).unwrap().set().unwrap();
    });
}

/// Starts the process, and waits until it has all that it takes.
fn worker(server: &Process, watcher: &Client) -> Another {
    let worker = Another::start(&mut role("role_of_a_client", ROLE, &server.addr));
    watcher.events("e", 1, 2).unwrap().at(0, 0).unwrap().wait().unwrap();
    worker
}

#[test]
fn who_does_not_come_back_is_lost_after_a_lease() {
    let (_dir, state) = state();
    let mut server = Process::start(&["--state", &state, "--lease", "2"]);
    let a = client(&server);
    let mut worker = worker(&server, &a);
    let lock = a.locks("l", 1, 2).unwrap().at(0, 1).unwrap();
    let never = a.events("n", 1, 1).unwrap().at(0, 0).unwrap();
    let barrier = a.barriers("b", 1, 1, 2).unwrap().at(0, 0).unwrap();
    std::thread::scope(|s| {
        let waiter = s.spawn(|| never.wait_with_options(&WaitOptions::new().peers(["rank 1"])));
        let queued = s.spawn(|| {
            let guard = lock.lock().unwrap();
            (guard.token(), guard.was_abandoned(), Instant::now())
        });
        eventually("both wait", || a.info().unwrap().parked_waits == 3);
        server.kill();
        worker.kill();
        // It takes as long as it takes: only then the lease begins.
        std::thread::sleep(LEASE / 4);
        let back = Instant::now();
        server.start_again();
        assert!(lock.is_locked().unwrap() && !barrier.is_broken().unwrap());
        let error = waiter.join().unwrap().unwrap_err();
        assert!(
            matches!(&error, Error::PeerLost { peer, how: Parted::Silent, .. } if peer == "rank 1"),
            "{error}"
        );
        assert!(back.elapsed() >= LEASE, "it had a lease to come back: {:?}", back.elapsed());
        let (token, abandoned, when) = queued.join().unwrap();
        assert_eq!((token, abandoned), (2, true));
        assert!(when - back >= LEASE);
        assert!(when - back < LEASE + Duration::from_secs(5), "{:?}", when - back);
    });
    let error = barrier.wait().unwrap_err();
    let by = match &error {
        Error::BarrierBroken { by, .. } => by.as_deref(),
        _ => None,
    };
    assert_eq!(by, Some("rank 1"), "{error}");
    assert!(a.events("e", 1, 2).unwrap().at(0, 1).unwrap().is_set().unwrap(), "the will is done");
    // The loss is remembered over a further life.
    server.kill();
    server.start_again();
    let error = never.wait_with_options(&WaitOptions::new().peers(["rank 1"])).unwrap_err();
    assert!(matches!(&error, Error::PeerLost { .. }), "{error}");
    let new = client(&server);
    new.join("rank 1").unwrap();
    let options = WaitOptions::new().peers(["rank 1"]).timeout(Duration::from_millis(20));
    assert!(!never.wait_with_options(&options).unwrap(), "it is back");
}

#[test]
fn who_has_said_goodbye_is_not_expected_back() {
    let (_dir, state) = state();
    let mut server = Process::start(&["--state", &state]);
    let (a, b) = (client(&server), client(&server));
    b.join("rank 1").unwrap();
    let lock = b.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    let guard = lock.lock().unwrap();
    b.release().unwrap();
    drop(guard);
    eventually("it is gone", || a.members().unwrap().len() == 1);
    server.kill();
    server.start_again();
    assert_eq!(a.members().unwrap().len(), 1);
    let next = a.locks("l", 1, 1).unwrap().at(0, 0).unwrap().lock().unwrap();
    assert!(!next.was_abandoned());
    client(&server).join("rank 1").unwrap();
}

/// As on a machine where that file alone was lost, or moved away.
#[test]
fn without_the_file_of_sessions_everything_held_is_abandoned() {
    let (dir, state) = state();
    let mut server = Process::start(&["--state", &state]);
    let (a, b) = (client(&server), client(&server));
    let guard = a.locks("l", 1, 2).unwrap().at(0, 1).unwrap().lock().unwrap();
    let barriers = a.barriers("b", 1, 2, 2).unwrap();
    let (half, whole) = (barriers.at(0, 0).unwrap(), barriers.at(0, 1).unwrap());
    let theirs = b.barriers("b", 1, 2, 2).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| theirs.at(0, 1).unwrap().wait().unwrap());
        whole.wait().unwrap();
    });
    std::thread::scope(|s| {
        let waiter = s.spawn(|| half.wait());
        eventually("it waits", || b.info().unwrap().parked_waits == 1);
        server.kill();
        std::fs::remove_file(dir.path().join("state/sessions")).unwrap();
        server.start_again();
        let error = waiter.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::LeaseLost { .. }), "{error}");
    });
    let error = guard.unlock().unwrap_err();
    assert!(matches!(error, Error::LeaseLost { .. }), "{error}");
    let next = b.locks("l", 1, 2).unwrap().at(0, 1).unwrap().lock().unwrap();
    assert!(next.was_abandoned());
    assert_eq!(next.token(), 2, "tokens go on");
    let error = theirs.at(0, 0).unwrap().wait().unwrap_err();
    assert!(matches!(error, Error::BarrierBroken { .. }), "{error}");
    assert!(!whole.is_broken().unwrap());
    half.reset().unwrap();
    for col in 0..2 {
        std::thread::scope(|s| {
            s.spawn(|| theirs.at(0, col).unwrap().wait().unwrap());
            let passed = barriers.at(0, col).unwrap().wait().unwrap();
            assert_eq!(passed.generation(), col as u64, "what was passed before counts");
        });
    }
}

/// The server is started again, by this or that, while one holds a lock and
/// others queue for it and for a permit.
fn queues_over_a_restart(choice: TransportChoice, mut server: Process, forget: &dyn Fn()) {
    let of = |server: &Process| {
        Client::builder().addr(&server.addr).key(key()).transport(choice).connect().unwrap()
    };
    let (a, b) = (of(&server), of(&server));
    let lock = |of: &Client| of.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    let permit = |of: &Client| of.semaphores("s", 1, 1, 0, 2).unwrap().at(0, 0).unwrap();
    let long = Duration::from_secs(20);
    let held = lock(&a).lock().unwrap();
    std::thread::scope(|s| {
        // One of the session that holds it, one of another.
        let waiters = [&a, &b].map(|client| {
            s.spawn(move || {
                let guard = lock(client).lock_timeout(long).unwrap().expect("it was free");
                guard.check().unwrap();
                guard.unlock().unwrap();
            })
        });
        let permits = [&a, &b]
            .map(|client| s.spawn(move || assert!(permit(client).acquire_timeout(long).unwrap())));
        eventually("four wait", || a.info().unwrap().parked_waits == 4);
        server.kill();
        forget();
        server.start_again();
        eventually("the permits are waited for", || {
            lock(&b).token().is_ok() && a.info().unwrap().parked_waits >= 2
        });
        // It still holds it where the state was kept, and has lost it otherwise.
        drop(held);
        for waiter in waiters {
            waiter.join().unwrap();
        }
        for _ in 0..2 {
            permit(&a).release().unwrap();
        }
        for permit in permits {
            permit.join().unwrap();
        }
    });
    assert_eq!(permit(&b).available().unwrap(), 0);
    assert!(!lock(&b).is_locked().unwrap());
    lock(&b).try_lock().unwrap().expect("nobody holds it").unlock().unwrap();
}

#[test]
fn who_queues_gets_what_it_can_use_after_a_restart() {
    for choice in [TransportChoice::Tcp, TransportChoice::Shm] {
        queues_over_a_restart(choice, Process::start(&[]), &|| {});
        let (dir, path) = state();
        let server = Process::start(&["--state", &path]);
        queues_over_a_restart(choice, server, &|| {});
        let sessions = dir.path().join("state/sessions");
        std::fs::remove_dir_all(dir.path().join("state")).unwrap();
        let server = Process::start(&["--state", &path]);
        queues_over_a_restart(choice, server, &|| std::fs::remove_file(&sessions).unwrap());
    }
}
