//! Promise: whoever is gone is missed within its lease: those who named it are
//! told, its locks come free, its barriers break by its name, its will is done;
//! and when it was only stopped, it learns that its time is over.

mod common;
use common::another::{Another, role};
use common::proxy::Proxy;
use common::{client, eventually, key, server};
use farcell::{Client, Error, HoldingKind, Parted, Server, WaitOptions};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);

fn connect(server: &Server) -> Client {
    client(server).connect().unwrap()
}

// ---- learners in processes of their own --------------------------------------

/// Which learner the process is to be, and where the server is.
const ROLE: &str = "FARCELL_TEST_LEARNER";
const LEARNERS: usize = 8;
const KILLED: usize = 6;
const STOPPED: usize = 7;
const LEASE: Duration = Duration::from_secs(1);

fn say(what: &str) {
    // Not by print!, which tests capture.
    let mut out = std::io::stdout().lock();
    writeln!(out, "#{what}").unwrap();
    out.flush().unwrap();
}

/// In a process that the test below has started: a learner. Otherwise nothing.
#[test]
#[ignore = "only a process of the test of learners"]
fn role_of_a_learner() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let (index, addr) = role.split_once(' ').unwrap();
    let index: usize = index.parse().unwrap();
    let client = Client::builder().addr(addr).key(key()).connect().unwrap();
    client.join(&format!("rank {index}")).unwrap();
    let barrier = client.barriers("b", 1, 1, LEARNERS).unwrap().at(0, 0).unwrap();
    let wills = client.events("wills", 1, LEARNERS).unwrap();
    let locks = client.locks("l", 1, LEARNERS).unwrap();
    if index == KILLED || index == STOPPED {
        let mut will = client.batch();
        will.set(&wills.flat(index).unwrap());
        client.set_will(&will).unwrap();
        let guard = locks.flat(index).unwrap().lock().unwrap();
        barrier.wait().unwrap();
        say(&format!("holding {}", guard.token()));
        // One is killed here, the other one goes on when it is told to.
        std::io::stdin().lock().read_line(&mut String::new()).unwrap();
        match guard.unlock() {
            Err(Error::LeaseLost { .. }) => say("late"),
            other => say(&format!("unlocked {other:?}")),
        }
        client.join(&format!("rank {index}")).unwrap();
        say("back");
        client.release().unwrap();
        return;
    }
    barrier.wait().unwrap();
    let never = client.events("never", 1, 1).unwrap().at(0, 0).unwrap();
    thread::scope(|s| {
        for peer in [KILLED, STOPPED] {
            let (never, locks) = (&never, &locks);
            s.spawn(move || {
                let options = WaitOptions::new().peers([format!("rank {peer}"), "nobody".into()]);
                match never.wait_with_options(&options) {
                    Err(Error::PeerLost { peer, how: Parted::Silent, .. }) => {
                        say(&format!("lost {peer}"));
                    }
                    other => say(&format!("not lost {other:?}")),
                }
            });
            s.spawn(move || {
                let guard = locks.flat(peer).unwrap().lock().unwrap();
                say(&format!("lock {peer} {} {}", guard.token(), guard.was_abandoned()));
                guard.unlock().unwrap();
            });
        }
        s.spawn(|| match barrier.wait() {
            Err(Error::BarrierBroken { by: Some(by), .. }) => say(&format!("broken {by}")),
            other => say(&format!("not broken {other:?}")),
        });
    });
    client.release().unwrap();
    say("through");
}

struct Learner {
    process: Another,
    stdin: ChildStdin,
}

impl Learner {
    fn start(index: usize, addr: &str, heard: mpsc::Sender<(usize, String)>) -> Learner {
        let mut command = role("role_of_a_learner", ROLE, format!("{index} {addr}"));
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Another::start(command);
        let lines = BufReader::new(process.0.stdout.take().unwrap()).lines();
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                // The test harness writes into the same line.
                if let Some((_, what)) = line.split_once('#') {
                    let _ = heard.send((index, what.to_owned()));
                }
            }
        });
        let stdin = process.0.stdin.take().unwrap();
        Learner { process, stdin }
    }
}

#[test]
fn of_eight_learners_one_is_killed_and_one_is_stopped() {
    let server = server().lease(LEASE).start().unwrap();
    let watcher = connect(&server);
    let (told, heard) = mpsc::channel();
    let mut learners: Vec<Learner> =
        (0..LEARNERS).map(|i| Learner::start(i, &server.address(), told.clone())).collect();
    for _ in 0..2 {
        let (who, what) = heard.recv_timeout(LONG).unwrap();
        assert!(who >= KILLED && what == "holding 1", "{who} {what}");
    }
    // Each of six waits for two peers, for two locks and at the barrier.
    eventually("all wait", || server.parked_waits() == 6 * 5);
    let members = watcher.members().unwrap();
    assert_eq!(members.iter().filter(|m| m.name.is_some()).count(), LEARNERS);
    for member in members.iter().filter(|m| m.name.is_some()) {
        let holds = |what| member.holds.iter().filter(|h| what == h.what).count();
        let dies = ["rank 6", "rank 7"].contains(&member.name.as_deref().unwrap());
        assert_eq!(holds(HoldingKind::Lock { token: 1 }), usize::from(dies));
        assert_eq!(holds(HoldingKind::Party), 1);
        assert_eq!(holds(HoldingKind::Queue), if dies { 0 } else { 2 });
    }

    let begun = Instant::now();
    learners[KILLED].process.signal("KILL");
    learners[STOPPED].process.signal("STOP");
    let mut said: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    for _ in 0..6 * 6 {
        let (who, what) = heard.recv_timeout(LONG).unwrap();
        said.entry(who).or_default().push(what);
    }
    let took = begun.elapsed();
    println!("everyone knew and was through after {took:?}, with a lease of {LEASE:?}");
    // The lease, the time between two looks at leases, and time to run.
    assert!(took < LEASE + Duration::from_millis(250) + Duration::from_secs(2), "{took:?}");
    assert_eq!(said.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    let mut tokens: BTreeMap<(String, String), String> = BTreeMap::new();
    for lines in said.values() {
        for peer in ["rank 6", "rank 7"] {
            assert!(lines.contains(&format!("lost {peer}")), "{lines:?}");
        }
        let broken = lines.iter().find_map(|l| l.strip_prefix("broken ")).unwrap();
        assert!(["rank 6", "rank 7"].contains(&broken), "{lines:?}");
        assert_eq!(lines.last().unwrap(), "through");
        for line in lines.iter().filter_map(|l| l.strip_prefix("lock ")) {
            let parts: Vec<&str> = line.split(' ').collect();
            let key = (parts[0].to_owned(), parts[1].to_owned());
            assert_eq!(tokens.insert(key, parts[2].to_owned()), None, "a token twice");
        }
    }
    // The first one learns that the holder has left it, and each has a token.
    for lock in ["6", "7"] {
        for token in 2..8u64 {
            let abandoned = &tokens[&(lock.to_owned(), token.to_string())];
            assert_eq!(abandoned, if token == 2 { "true" } else { "false" }, "{lock} {token}");
        }
    }
    let wills = watcher.open_events("wills").unwrap();
    eventually("the wills are done", || wills.snapshot().unwrap()[KILLED..] == [true, true]);
    assert_eq!(wills.snapshot().unwrap().iter().filter(|set| **set).count(), 2);

    // The one that was stopped goes on, and what it takes for its own is not.
    let lock = watcher.open_locks("l").unwrap().flat(STOPPED).unwrap();
    let guard = lock.lock().unwrap();
    assert_eq!(guard.token(), 8);
    learners[STOPPED].process.signal("CONT");
    learners[STOPPED].stdin.write_all(b"go on\n").unwrap();
    assert_eq!(heard.recv_timeout(LONG).unwrap(), (STOPPED, "late".to_owned()));
    assert_eq!(heard.recv_timeout(LONG).unwrap(), (STOPPED, "back".to_owned()));
    guard.check().unwrap();
    guard.unlock().unwrap();
    for (i, learner) in learners.iter_mut().enumerate().filter(|(i, _)| *i != KILLED) {
        assert!(learner.process.0.wait().unwrap().success(), "learner {i}");
    }
    assert_eq!(server.parked_waits(), 0);
    eventually("only we are left", || server.sessions() == 1);
}

// ---- names, wills and ends, one by one -----------------------------------------

#[test]
fn a_name_is_had_by_one_who_lives() {
    let server = server().start().unwrap();
    let (a, b) = (connect(&server), connect(&server));
    a.join("rank 3").unwrap();
    a.join("rank 3").unwrap();
    let error = b.join("rank 3").unwrap_err();
    assert!(
        matches!(&error, Error::NameTaken { peer, seat } if peer == "rank 3" && *seat == a.seat())
    );
    for bad in ["", "two\nlines", &"x".repeat(129)] {
        assert!(matches!(b.join(bad), Err(Error::BadPeerName { .. })), "{bad:?}");
    }
    a.join("another").unwrap();
    b.join("rank 3").unwrap();
    let names: Vec<_> = a.members().unwrap().into_iter().map(|m| m.name.unwrap()).collect();
    assert_eq!(names, ["another", "rank 3"]);
}

#[test]
fn a_peer_that_was_lost_before_is_missed_until_it_comes_back() {
    let server = server().start().unwrap();
    let waiter = connect(&server);
    let event = waiter.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    let at_once = WaitOptions::new().peers(["p"]).timeout(Duration::ZERO);
    let soon = WaitOptions::new().peers(["p"]).timeout(Duration::from_millis(80));
    assert!(!event.wait_with_options(&soon).unwrap(), "who never came is not lost");
    let peer = connect(&server);
    peer.join("p").unwrap();
    peer.close();
    eventually("it is lost", || {
        matches!(event.wait_with_options(&soon), Err(Error::PeerLost { .. }))
    });
    thread::sleep(Duration::from_millis(60));
    match event.wait_with_options(&soon).unwrap_err() {
        Error::PeerLost { ago, .. } => assert!(ago >= Duration::from_millis(60), "{ago:?}"),
        other => panic!("{other}"),
    }
    event.set().unwrap();
    assert!(event.wait_with_options(&at_once).unwrap(), "what has happened counts first");
    event.clear().unwrap();
    connect(&server).join("p").unwrap();
    eventually("it is lost once more", || {
        matches!(event.wait_with_options(&soon), Err(Error::PeerLost { .. }))
    });
    let back = connect(&server);
    back.join("p").unwrap();
    assert!(!event.wait_with_options(&soon).unwrap());
    let bad = WaitOptions::new().peers([""]);
    assert!(matches!(event.wait_with_options(&bad), Err(Error::BadPeerName { .. })));
    let many = WaitOptions::new().peers((0..4000).map(|i| format!("peer number {i}")));
    assert!(matches!(event.wait_with_options(&many), Err(Error::BadSelection { .. })));
    let some = (0..1500).map(|i| format!("peer number {i}"));
    let some = WaitOptions::new().peers(some).timeout(Duration::from_millis(30));
    assert!(!event.wait_with_options(&some).unwrap());
}

#[test]
fn a_will_is_done_when_its_session_ends_and_not_when_it_is_released() {
    let server = server().start().unwrap();
    let heir = connect(&server);
    let event = heir.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    let counter = heir.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    let leave = || {
        let client = connect(&server);
        let mut will = client.batch();
        will.set(&client.events("e", 1, 1).unwrap().at(0, 0).unwrap());
        will.fetch_add(&client.counters("c", 1, 1).unwrap().at(0, 0).unwrap(), 5);
        client.set_will(&will).unwrap();
        client
    };
    thread::scope(|s| {
        let wait = s.spawn(|| event.wait_timeout(LONG).unwrap());
        eventually("it waits", || server.parked_waits() == 1);
        leave().close();
        assert!(wait.join().unwrap());
    });
    eventually("all of it is done", || counter.load().unwrap() == 5);
    event.clear().unwrap();
    leave().release().unwrap();
    let withdrawn = leave();
    withdrawn.set_will(&withdrawn.batch()).unwrap();
    withdrawn.close();
    eventually("both have gone", || server.sessions() == 1);
    assert!(!event.is_set().unwrap());
    assert_eq!(counter.load().unwrap(), 5);
    // Of an array that is gone it is void.
    let last = leave();
    heir.remove("c").unwrap();
    let other = heir.counters("d", 1, 1).unwrap().at(0, 0).unwrap();
    last.close();
    assert!(event.wait_timeout(LONG).unwrap());
    assert_eq!(other.load().unwrap(), 0);
    let mut reads = heir.batch();
    reads.set(&event).load(&other);
    let error = heir.set_will(&reads).unwrap_err();
    assert!(error.to_string().contains("operation 1 of the will"), "{error}");
    let foreign = connect(&server).batch();
    assert!(matches!(heir.set_will(&foreign), Err(Error::BadSelection { .. })));
}

#[test]
fn a_session_that_comes_in_place_of_a_lost_one_has_its_name_and_its_will() {
    let server = server().lease(Duration::from_millis(300)).start().unwrap();
    let proxy = Proxy::start(server.local_addrs()[0], Vec::new());
    let away = Client::builder().addr(proxy.addr()).key(key()).connect().unwrap();
    away.join("p").unwrap();
    let mut will = away.batch();
    will.fetch_add(&away.counters("c", 1, 1).unwrap().at(0, 0).unwrap(), 1);
    away.set_will(&will).unwrap();
    drop(will);
    let before = away.seat();
    let watcher = connect(&server);
    let counter = watcher.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    proxy.hold(true);
    eventually("its first will is done", || counter.load().unwrap() == 1);
    proxy.hold(false);
    eventually("it is back", || {
        let members = watcher.members().unwrap();
        members.iter().any(|m| m.name.as_deref() == Some("p"))
    });
    assert_ne!(away.seat(), before);
    away.close();
    eventually("its second will is done", || counter.load().unwrap() == 2);
}

#[test]
fn members_are_listed_however_many() {
    let server = server().start().unwrap();
    let clients: Vec<Client> = (0..60).map(|_| connect(&server)).collect();
    let long = "x".repeat(120);
    for (i, client) in clients.iter().enumerate() {
        client.join(&format!("{long}{i}")).unwrap();
        let locks = client.locks(&format!("{long}{i}"), 1, 40).unwrap();
        for col in 0..40 {
            // Kept until the session ends.
            std::mem::forget(locks.at(0, col).unwrap().lock().unwrap());
        }
    }
    let members = clients[0].members().unwrap();
    assert_eq!(members.len(), 60);
    for (i, member) in members.iter().enumerate() {
        assert_eq!(member.name.as_deref(), Some(format!("{long}{i}").as_str()));
        assert_eq!((member.holds.len(), member.holds_in_all), (32, 40));
        assert!(member.age < LONG && member.last_heard < LONG);
    }
}
