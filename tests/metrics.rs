//! Promise: a server that is told so tells Prometheus how it is, in a format that it
//! understands, whoever else connects to that address; and the dashboard and the
//! alerts ask for what it tells.
#![cfg(feature = "cli")]

mod common;
use common::page::{Page, scrape, talk};
use common::{client, eventually, key, server};
use farcell::{Client, Error, Key, Server, TransportChoice, WaitOptions};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn watched() -> farcell::ServerBuilder {
    server().metrics("127.0.0.1:0")
}

fn over_tcp(server: &Server) -> Client {
    client(server).transport(TransportChoice::Tcp).connect().unwrap()
}

fn promtool(args: &[&str], input: Option<&str>) {
    let mut command = Command::new("promtool");
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        // The strict reader above, and the comparison of names, stand for it.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return,
        Err(e) => panic!("promtool: {e}"),
    };
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(input.unwrap_or("").as_bytes()).unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "promtool {args:?}: {said}");
}

#[test]
fn operations_are_counted_to_the_last_one() {
    let server = watched().workers(2).start().unwrap();
    let clients = [over_tcp(&server), over_tcp(&server)];
    for client in &clients {
        let events = client.events("e", 2, 4).unwrap();
        let event = events.at(0, 0).unwrap();
        for _ in 0..5 {
            event.set().unwrap();
            event.clear().unwrap();
        }
        let n = client.counters("n", 1, 1).unwrap().at(0, 0).unwrap();
        for _ in 0..7 {
            n.fetch_add(1).unwrap();
        }
        events.all().snapshot().unwrap();
    }
    let page = scrape(&server);
    let of = |kind: &str, op: &str, transport: &str| {
        let labels = format!("kind=\"{kind}\",op=\"{op}\",transport=\"{transport}\"");
        page.value(&format!("farcell_operations_total{{{labels}}}"))
    };
    assert_eq!(of("event", "set", "tcp"), 10.0);
    assert_eq!(of("event", "clear", "tcp"), 10.0);
    assert_eq!(of("counter", "fetch_add", "tcp"), 14.0);
    assert_eq!(of("event", "load", "tcp"), 16.0);
    assert_eq!(of("event", "set", "rdma"), 0.0);
    assert_eq!(page.value("farcell_sessions{transport=\"tcp\",access=\"read_write\"}"), 2.0);
    assert_eq!(page.value("farcell_arrays{kind=\"event\"}"), 1.0);
    assert_eq!(page.value("farcell_atomicity_domain{domain=\"cpu\"}"), 1.0);
    let fell = "farcell_transport_fallbacks_total{wanted=\"rdma\",reason=\"asked\"}";
    assert_eq!(page.value(fell), 2.0);
    assert!(page.value("farcell_received_bytes_total{connection=\"session\"}") > 1000.0);
    assert!(page.value("farcell_sent_bytes_total{connection=\"session\"}") > 500.0);
    assert!(page.value("farcell_segment_cells_used") >= 9.0);
    promtool(&["check", "metrics"], Some(&page.text));
}

#[test]
fn what_the_server_does_not_see_is_not_counted_and_rings_are() {
    let server = watched().start().unwrap();
    let quick = client(&server).transport(TransportChoice::Shm).connect().unwrap();
    let event = quick.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    event.set().unwrap();
    event.clear().unwrap();
    let page = scrape(&server);
    let set = "farcell_operations_total{kind=\"event\",op=\"set\",transport=\"shm\"}";
    assert_eq!(page.value(set), 0.0);
    assert_eq!(page.value("farcell_sessions{transport=\"shm\",access=\"read_write\"}"), 1.0);
    // Someone waits at the server: the one in memory rings.
    let far = over_tcp(&server).events("e", 1, 1).unwrap().at(0, 0).unwrap();
    let waits = std::thread::spawn(move || far.wait());
    let parked = "farcell_parked_waits{where=\"server\"}";
    eventually("it waits", || scrape(&server).value(parked) == 1.0);
    event.set().unwrap();
    waits.join().unwrap().unwrap();
    let page = scrape(&server);
    assert_eq!(page.value("farcell_rings_total{transport=\"shm\"}"), 1.0);
    assert_eq!(page.value("farcell_wakeup_seconds_count"), 1.0);
}

#[test]
fn waits_wakeups_locks_and_losses_are_told() {
    let server = watched().lease(Duration::from_millis(300)).start().unwrap();
    let (one, two) = (over_tcp(&server), over_tcp(&server));
    let gate = one.locks("gate", 1, 2).unwrap().at(0, 0).unwrap();
    let theirs = two.locks("gate", 1, 2).unwrap().at(0, 0).unwrap();
    one.join("rank 0").unwrap();
    let guard = gate.lock().unwrap();
    let go = two.events("go", 1, 1).unwrap().at(0, 0).unwrap();
    let queue = std::thread::spawn(move || theirs.lock().map(|guard| guard.was_abandoned()));
    let options = WaitOptions::new().peers(["rank 0"]);
    let waits = std::thread::spawn(move || go.wait_with_options(&options));
    eventually("both wait", || {
        let page = scrape(&server);
        page.value("farcell_queued_claims{kind=\"lock\"}") == 1.0
            && page.value("farcell_parked_waits{where=\"server\"}") == 2.0
            && page.value("farcell_locks_held") == 1.0
    });
    // It goes without unlocking and without a release.
    std::mem::forget(guard);
    one.close();
    assert!(queue.join().unwrap().unwrap(), "it was abandoned");
    assert!(matches!(waits.join().unwrap(), Err(Error::PeerLost { .. })));
    let page = scrape(&server);
    assert_eq!(page.value("farcell_locks_abandoned_total"), 1.0);
    assert_eq!(page.value("farcell_peers_lost_total"), 1.0);
    assert_eq!(page.value("farcell_peer_lost_told_total"), 1.0);
    assert_eq!(page.value("farcell_sessions_ended_total{how=\"closed\"}"), 1.0);
    assert_eq!(page.value("farcell_wakeup_seconds_count"), 2.0);
    assert!(page.value("farcell_wakeup_seconds_sum") > 0.0);
    let buckets = page.values.iter().filter(|(name, _)| name.contains("_seconds_bucket"));
    assert!(buckets.clone().count() >= 10);
    assert!(page.text.contains("farcell_wakeup_seconds_bucket{le=\"+Inf\"} 2"));
    assert!(buckets.map(|(_, n)| *n).all(|n| n <= 2.0));
}

#[test]
fn connections_that_were_refused_are_told_by_reason() {
    let server = watched().start().unwrap();
    let wrong = Key::new(*b"another key, but long enough").unwrap();
    let refused = Client::builder().addr(server.address()).key(wrong).connect();
    assert!(matches!(refused, Err(Error::AuthenticationFailed { .. })));
    let mut stranger = TcpStream::connect(server.local_addrs()[0]).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let _ = stranger.read_to_end(&mut Vec::new());
    let page = scrape(&server);
    assert_eq!(page.value("farcell_handshakes_refused_total{reason=\"key\"}"), 1.0);
    assert_eq!(page.value("farcell_handshakes_refused_total{reason=\"not_farcell\"}"), 1.0);
}

#[test]
fn slow_and_hostile_scrapers_hold_nobody_up() {
    let server = watched().start().unwrap();
    let addr = server.metrics_addrs()[0];
    // More than it keeps, each with half a request.
    let mut idle = Vec::new();
    for _ in 0..200 {
        let mut stream = TcpStream::connect(addr).unwrap();
        let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nX: ");
        idle.push(stream);
    }
    // One that asks and never reads, again and again.
    let mut deaf = TcpStream::connect(addr).unwrap();
    let _ = deaf.write_all("GET /metrics HTTP/1.1\r\n\r\n".repeat(1000).as_bytes());
    let begun = Instant::now();
    scrape(&server);
    let event = over_tcp(&server).events("e", 1, 1).unwrap().at(0, 0).unwrap();
    event.set().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());

    let long = format!("GET /metrics HTTP/1.1\r\nX: {}", "x".repeat(20_000));
    let mut stream = TcpStream::connect(addr).unwrap();
    let _ = stream.write_all(long.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.starts_with(b"HTTP/1.1 431 "), "{}", String::from_utf8_lossy(&answer));
    for (request, status) in [
        ("GET /healthz HTTP/1.1\r\n\r\n", "HTTP/1.1 200 "),
        ("GET /other HTTP/1.1\r\n\r\n", "HTTP/1.1 404 "),
        ("DELETE /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 "),
        ("nonsense\r\n\r\n", "HTTP/1.1 400 "),
    ] {
        assert!(talk(addr, request).starts_with(status), "{request:?}");
    }
    let head = talk(addr, "HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(head.ends_with("\r\n\r\n") && head.contains("Content-Length: "), "{head}");
    // Half a request is answered in the end, and the connection with it.
    let mut half = TcpStream::connect(addr).unwrap();
    half.write_all(b"GET /metr").unwrap();
    half.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut answer = String::new();
    half.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
}

#[test]
fn an_address_that_cannot_be_had_is_named_and_ipv6_can() {
    let six = match std::net::TcpListener::bind("[::1]:0") {
        Ok(_) => "[::1]:0",
        // This machine has none.
        Err(_) => "127.0.0.1:0",
    };
    let first = server().metrics(six).start().unwrap();
    scrape(&first);
    let taken = first.metrics_addrs()[0].to_string();
    match server().metrics(&*taken).start() {
        Err(Error::Bind { addr, .. }) => assert_eq!(addr, taken),
        other => panic!("{other:?}"),
    }
    assert!(server().start().unwrap().metrics_addrs().is_empty(), "off unless told");
    drop(first);
    // Its thread and its socket are gone.
    server().metrics(&*taken).start().unwrap();
}

/// The names of metrics in an expression.
fn names(expr: &str) -> BTreeSet<&str> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    expr.split(|c| !word(c)).filter(|name| name.starts_with("farcell_")).collect()
}

fn told(page: &Page, name: &str) -> bool {
    let parts = ["_bucket", "_sum", "_count"];
    let of_histogram = parts.iter().filter_map(|part| name.strip_suffix(part));
    page.types.contains_key(name)
        || of_histogram.into_iter().any(|n| page.types.get(n).is_some_and(|t| t == "histogram"))
}

#[test]
fn dashboard_and_alerts_ask_for_what_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let server = watched()
        .snapshots(folder.path())
        .snapshot_every(Duration::from_millis(20))
        .start()
        .unwrap();
    eventually("a snapshot is told", || scrape(&server).text.contains("snapshot_age_seconds"));
    let page = scrape(&server);
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/deploy");

    let text = std::fs::read_to_string(deploy.join("grafana-dashboard.json")).unwrap();
    let board: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(board["schemaVersion"].as_u64().unwrap() >= 36);
    let variables = board["templating"]["list"].as_array().unwrap();
    assert!(variables.iter().any(|v| v["name"] == "datasource" && v["type"] == "datasource"));
    let (mut asked, mut ids, mut places) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for panel in board["panels"].as_array().unwrap() {
        let at = &panel["gridPos"];
        let number = |name: &str| at[name].as_u64().unwrap();
        assert!(number("x") + number("w") <= 24 && number("h") > 0, "{panel}");
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "two panels with one id");
        assert!(places.insert((number("y"), number("x"))), "two panels in one place");
        if panel["type"] == "row" {
            continue;
        }
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{panel}");
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty());
        for target in targets {
            let expr = target["expr"].as_str().unwrap();
            assert!(!names(expr).is_empty(), "{expr}");
            asked.extend(names(expr).into_iter().map(str::to_owned));
        }
    }
    for name in &asked {
        assert!(told(&page, name), "the dashboard asks for {name}, which nobody tells");
    }
    for name in page.types.keys() {
        let shown = asked.iter().any(|a| a == name || a.starts_with(&format!("{name}_")));
        let for_alerts =
            ["sessions_silent", "sessions_limit", "lease_seconds", "transport_offered"];
        let elsewhere = for_alerts.iter().any(|n| name.ends_with(n));
        assert!(shown || elsewhere, "{name} is on no panel");
    }

    let rules = deploy.join("alerts.yml");
    let alerts = std::fs::read_to_string(&rules).unwrap();
    let asked = names(&alerts);
    assert!(asked.len() > 10);
    for name in asked {
        assert!(told(&page, name), "an alert asks for {name}, which nobody tells");
    }
    promtool(&["check", "rules", rules.to_str().unwrap()], None);
}

#[test]
fn the_key_is_nowhere_on_the_page() {
    let server = watched().start().unwrap();
    let _client = over_tcp(&server);
    let text = scrape(&server).text;
    assert!(!text.contains("the key of the tests"));
    drop(key());
}
