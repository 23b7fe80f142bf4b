//! Promise: anyone with a session can see who waits for what, who holds what, and
//! why a client does without a transport.

mod common;
use common::{client, eventually, key, server};
use farcell::{Client, Comparison, HeldState, Key, TransportChoice, WaitOptions, WaitingHow};
use std::time::Duration;

fn named(server: &farcell::Server, name: &str) -> Client {
    let client = client(server).transport(TransportChoice::Tcp).connect().unwrap();
    client.join(name).unwrap();
    client
}

/// Ends a session.
struct Closes(Client);

impl Drop for Closes {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[test]
fn a_read_only_session_sees_waits_locks_barriers_and_permits() {
    let glance = Key::new(*b"for those who only look").unwrap();
    let server = server().read_only_key(glance.clone()).start().unwrap();
    let watcher = Client::builder().addr(server.address()).key(glance).connect().unwrap();
    let (one, two) = (named(&server, "rank 0"), named(&server, "rank 1"));
    let seat = |name: &str| {
        let members = watcher.members().unwrap();
        members.into_iter().find(|m| m.name.as_deref() == Some(name)).unwrap().seat
    };
    let go = one.events("go", 2, 3).unwrap().at(1, 2).unwrap();
    let gate = one.locks("gate", 1, 2).unwrap().at(0, 1).unwrap();
    let theirs = two.locks("gate", 1, 2).unwrap().at(0, 1).unwrap();
    let start = two.barriers("start", 1, 1, 3).unwrap().at(0, 0).unwrap();
    let permits = one.semaphores("permits", 1, 1, 2, 2).unwrap().at(0, 0).unwrap();
    permits.acquire().unwrap();
    let guard = gate.lock().unwrap();
    std::thread::scope(|scope| {
        // Should something be wrong, nobody waits on.
        let _closes = [Closes(one.clone()), Closes(two.clone())];
        let options = WaitOptions::new().peers(["rank 1", "rank 7"]);
        scope.spawn(move || go.wait_with_options(&options));
        let waiting = scope.spawn(move || theirs.lock().map(drop));
        let arrives = scope.spawn(move || start.wait().map(drop));
        eventually("three wait", || watcher.waits().unwrap().len() == 3);

        let waits = watcher.waits().unwrap();
        let wait = waits.iter().find(|w| w.cells[0].name == "go").unwrap();
        assert_eq!((wait.seat, wait.how), (seat("rank 0"), WaitingHow::Parked));
        assert_eq!((wait.cells[0].row, wait.cells[0].col), (1, 2));
        assert_eq!(wait.cells[0].until, Some((Comparison::Ne, 0)));
        assert_eq!(wait.peers, ["rank 1", "rank 7"]);
        let queue = waits.iter().find(|w| w.how == WaitingHow::Queued).unwrap();
        assert_eq!((queue.seat, queue.cells[0].until), (seat("rank 1"), None));
        let before = queue.since.unwrap();
        eventually("time goes on", || {
            let waits = watcher.waits().unwrap();
            let queue = waits.iter().find(|w| w.how == WaitingHow::Queued).unwrap();
            queue.since.unwrap() >= before + Duration::from_millis(20)
        });

        let held = watcher.holders().unwrap();
        let find = |name: &str| held.iter().find(|held| held.name == name).unwrap();
        let lock = find("gate");
        assert_eq!((lock.row, lock.col, lock.queued), (0, 1, 1));
        assert!(matches!(lock.state, HeldState::Lock { holder: Some(at), token: 1, .. }
            if at == seat("rank 0")));
        let HeldState::Barrier { needed: 3, arrived: 1, broken: false, parties, .. } =
            &find("start").state
        else {
            panic!("{held:?}");
        };
        assert_eq!(parties, &[(seat("rank 1"), true)]);
        assert_eq!(find("permits").state, HeldState::Semaphore { free: 1, most: 2 });

        let tallies = watcher.tallies().unwrap();
        let tally = tallies.iter().find(|tally| tally.seat == seat("rank 0")).unwrap();
        assert!(tally.operations >= 1, "{tally:?}");
        assert!(tally.waits >= 1 && tally.requests >= 4, "{tally:?}");
        let fallbacks: Vec<_> = tally.fallbacks.iter().map(|f| (f.wanted, f.reason)).collect();
        assert_eq!(fallbacks, [("shm", "asked"), ("rdma", "asked")]);

        guard.unlock().unwrap();
        waiting.join().unwrap().unwrap();
        one.close();
        two.close();
        assert!(arrives.join().unwrap().is_err());
    });
    eventually("nobody waits any more", || watcher.waits().unwrap().is_empty());
}

#[test]
fn many_waits_and_locks_are_all_listed() {
    let server = server().start().unwrap();
    let watcher = client(&server).transport(TransportChoice::Tcp).connect().unwrap();
    let other = named(&server, "many");
    let locks = other.locks("locks", 40, 100).unwrap();
    let mut guards = Vec::new();
    for row in 0..40 {
        for col in 0..100 {
            guards.push(locks.at(row, col).unwrap().lock().unwrap());
        }
    }
    let held = watcher.holders().unwrap();
    assert_eq!(held.len(), 4000);
    let places: Vec<_> = held.iter().map(|held| (held.row, held.col)).collect();
    let expected: Vec<_> = (0..40).flat_map(|r| (0..100).map(move |c| (r, c))).collect();
    assert_eq!(places, expected);
    drop(guards);
    assert!(watcher.holders().unwrap().is_empty());
}

#[test]
fn one_who_sleeps_in_memory_is_seen_too() {
    let server = server().start().unwrap();
    let watcher = Client::builder().addr(server.address()).key(key()).connect().unwrap();
    let sleeper = client(&server).connect().unwrap();
    if sleeper.transport().name != "shm" {
        panic!("a client on this machine has its memory: {:?}", sleeper.transport());
    }
    let go = sleeper.events("go", 1, 4).unwrap().at(0, 3).unwrap();
    let again = watcher.events("go", 1, 4).unwrap().at(0, 3).unwrap();
    let waits = std::thread::spawn(move || go.wait());
    eventually("it is seen", || {
        let waits = watcher.waits().unwrap();
        let seen = waits.iter().find(|w| w.how == WaitingHow::Asleep);
        seen.is_some_and(|w| w.seat == sleeper.seat() && w.cells[0].col == 3)
    });
    again.set().unwrap();
    waits.join().unwrap().unwrap();
}
