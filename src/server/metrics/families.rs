//! The numbers of a server, as Prometheus has them.
//!
//! Names end as its conventions say: `_total` for what only grows, and base
//! units, seconds and bytes.

use super::super::Shared;
use super::super::meter::{Meter, Turned, WAKE_BOUNDS};
use crate::auth::Domain;
use crate::catalog::Kind;
use crate::cell::Op;
use crate::engine::{Counts, Gone, Standing, Way};
use crate::wire::FellReason;
use prometheus::proto::{
    Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType,
};
use prometheus::{Encoder, TextEncoder};
use std::sync::atomic::{AtomicU64, Ordering};

const WAYS: [(Way, &str); 3] = [(Way::Tcp, "tcp"), (Way::Rdma, "rdma"), (Way::Shm, "shm")];

type Labels<'a> = &'a [(&'a str, &'a str)];

/// What is written.
#[derive(Default)]
struct Families(Vec<MetricFamily>);

fn read(number: &AtomicU64) -> f64 {
    // Relaxed: numbers for people.
    number.load(Ordering::Relaxed) as f64
}

fn labelled(labels: Labels<'_>) -> Metric {
    let pair = |&(name, value): &(&str, &str)| {
        let mut pair = LabelPair::default();
        pair.set_name(name.to_owned());
        pair.set_value(value.to_owned());
        pair
    };
    Metric::from_label(labels.iter().map(pair).collect())
}

impl Families {
    fn push(&mut self, name: &str, help: &str, kind: MetricType, metrics: Vec<Metric>) {
        let mut family = MetricFamily::default();
        family.set_name(name.to_owned());
        family.set_help(help.to_owned());
        family.set_field_type(kind);
        family.set_metric(metrics);
        self.0.push(family);
    }

    /// A gauge with these values.
    fn gauges(&mut self, name: &str, help: &str, values: &[(Labels<'_>, f64)]) {
        let metric = |(labels, value): &(Labels<'_>, f64)| {
            let (mut metric, mut gauge) = (labelled(labels), Gauge::default());
            gauge.set_value(*value);
            metric.set_gauge(gauge);
            metric
        };
        self.push(name, help, MetricType::GAUGE, values.iter().map(metric).collect());
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.gauges(name, help, &[(&[], value)]);
    }

    /// A counter with these values.
    fn counters(&mut self, name: &str, help: &str, values: &[(Labels<'_>, f64)]) {
        let metric = |(labels, value): &(Labels<'_>, f64)| {
            let (mut metric, mut counter) = (labelled(labels), Counter::default());
            counter.set_value(*value);
            metric.set_counter(counter);
            metric
        };
        self.push(name, help, MetricType::COUNTER, values.iter().map(metric).collect());
    }

    fn counter(&mut self, name: &str, help: &str, value: f64) {
        self.counters(name, help, &[(&[], value)]);
    }
}

/// Whether an array of this kind can have this operation.
fn fits(kind: Kind, op: Op) -> bool {
    match op {
        Op::Load | Op::Waiters => true,
        Op::Set | Op::Clear | Op::Take => kind == Kind::Event,
        Op::Acquire | Op::Release => kind == Kind::Lock,
        Op::Down | Op::Up => kind == Kind::Semaphore,
        Op::Arrive | Op::Break | Op::Reset => kind == Kind::Barrier,
        Op::Store | Op::Add | Op::CompareExchange | Op::Swap | Op::And | Op::Or | Op::Xor => {
            kind == Kind::Counter
        }
    }
}

/// All of it, in the text format. Takes the engine's locks, each for a moment,
/// and looks at every lock and barrier.
///
/// # Errors
/// The library cannot write it.
pub(super) fn text(shared: &Shared) -> prometheus::Result<String> {
    let mut all = Families::default();
    server(&mut all, shared);
    let standing = shared.engine.standing(shared.now());
    sessions(&mut all, shared, &standing);
    operations(&mut all, shared);
    waits(&mut all, shared, &standing);
    contents(&mut all, shared, &standing);
    traffic(&mut all, shared);
    let mut bytes = Vec::with_capacity(32 << 10);
    TextEncoder::new().encode(&all.0, &mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn server(all: &mut Families, shared: &Shared) {
    let version: Labels<'_> = &[("version", env!("CARGO_PKG_VERSION"))];
    all.gauges("farcell_build_info", "1; the label is the version that runs.", &[(version, 1.0)]);
    let started = shared.began.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    all.gauge(
        "farcell_start_time_seconds",
        "When the server started, in seconds since 1970.",
        started.as_secs_f64(),
    );
    let is = |domain| f64::from(u8::from(shared.domain == domain));
    all.gauges(
        "farcell_atomicity_domain",
        "1 for the one that changes the cells: the server's CPU, or its RDMA adapter (hca).",
        &[(&[("domain", "cpu")], is(Domain::Cpu)), (&[("domain", "hca")], is(Domain::Hca))],
    );
    let yes = |yes: bool| f64::from(u8::from(yes));
    all.gauges(
        "farcell_transport_offered",
        "Whether the server offers the transport to its clients.",
        &[
            (&[("transport", "tcp")], 1.0),
            (&[("transport", "rdma")], yes(shared.rdma.is_some())),
            (&[("transport", "shm")], yes(shared.shm.is_ok())),
        ],
    );
}

fn sessions(all: &mut Families, shared: &Shared, standing: &Standing) {
    let mut values: Vec<(Vec<(&str, &str)>, f64)> = Vec::new();
    for (way, name) in WAYS {
        for (place, access) in ["read_write", "read_only"].into_iter().enumerate() {
            let labels = vec![("transport", name), ("access", access)];
            values.push((labels, standing.sessions[way as usize][place] as f64));
        }
    }
    let values: Vec<_> = values.iter().map(|(labels, value)| (&labels[..], *value)).collect();
    all.gauges(
        "farcell_sessions",
        "Sessions that live, by the way that their operations take now.",
        &values,
    );
    all.gauge(
        "farcell_sessions_silent",
        "Sessions of which nothing was heard for more than half of their lease.",
        standing.silent as f64,
    );
    all.gauge(
        "farcell_sessions_limit",
        "The most sessions that the server has room for.",
        shared.most_clients as f64,
    );
    all.gauge(
        "farcell_lease_seconds",
        "How long a session lives without a sign from its client.",
        shared.lease.as_secs_f64(),
    );
    let events = &shared.engine.events;
    all.counter("farcell_sessions_begun_total", "Sessions that began.", read(&events.begun));
    let ended = |how: Gone| read(&events.ended[how as usize]);
    all.counters(
        "farcell_sessions_ended_total",
        "Sessions that ended: with their lease, closed, or released, which hands over cleanly.",
        &[
            (&[("how", "lease")], ended(Gone::Silent)),
            (&[("how", "closed")], ended(Gone::Closed)),
            (&[("how", "released")], ended(Gone::Released)),
        ],
    );
    all.counter(
        "farcell_lease_expiries_total",
        "Sessions that ended because nothing was heard of their client for the lease.",
        ended(Gone::Silent),
    );
    all.counter(
        "farcell_reconnects_total",
        "Sessions that a client took up again over another connection.",
        read(&events.resumed),
    );
    let refused: Vec<_> = Turned::ALL.map(|why| [("reason", why.name())]).to_vec();
    let values: Vec<_> = refused
        .iter()
        .zip(&shared.tolls.turned)
        .map(|(labels, n)| (&labels[..], read(n)))
        .collect();
    all.counters(
        "farcell_handshakes_refused_total",
        "Connections that did not become a session, by reason.",
        &values,
    );
    let mut values = Vec::new();
    for (way, name) in WAYS.into_iter().filter(|(way, _)| *way != Way::Tcp) {
        for reason in FellReason::ALL {
            let labels = vec![("wanted", name), ("reason", reason.name())];
            values.push((labels, read(&events.fell[way as usize][reason as usize])));
        }
    }
    let values: Vec<_> = values.iter().map(|(labels, value)| (&labels[..], *value)).collect();
    all.counters(
        "farcell_transport_fallbacks_total",
        "Transports that clients said they do not have, or have lost, by what they said the reason was.",
        &values,
    );
}

fn operations(all: &mut Families, shared: &Shared) {
    let sum = |f: &dyn Fn(&Counts) -> u64| shared.counts.iter().map(|c| f(c)).sum::<u64>() as f64;
    let mut values = Vec::new();
    for (way, transport) in WAYS {
        for kind in Kind::ALL {
            for op in Op::ALL.into_iter().filter(|op| fits(kind, *op)) {
                let labels =
                    vec![("kind", kind.name()), ("op", op.name()), ("transport", transport)];
                values.push((labels, sum(&|counts| counts.of(way, kind, op))));
            }
        }
    }
    let values: Vec<_> = values.iter().map(|(labels, value)| (&labels[..], *value)).collect();
    all.counters(
        "farcell_operations_total",
        "Operations on cells that the server carried out for requests, by the array's kind and the \
         session's transport. What clients do by themselves, over RDMA or in shared memory, the \
         server never sees, and it is not here.",
        &values,
    );
    all.counter(
        "farcell_requests_total",
        "Numbered requests that came over connections; one may hold many operations.",
        sum(&|counts| counts.frames().0),
    );
    all.counter(
        "farcell_waits_total",
        "Waits and claims of locks and permits that came over connections.",
        sum(&|counts| counts.frames().1),
    );
    all.counters(
        "farcell_rings_total",
        "Cells that clients changed by themselves under a waiter of the server, and rang for: the \
         part of their one-sided operations that the server sees.",
        &[
            (&[("transport", "shm")], sum(&|counts| counts.frames().2)),
            (&[("transport", "rdma")], meters(shared, |meter| &meter.doorbells)),
        ],
    );
}

fn meters(shared: &Shared, of: impl Fn(&Meter) -> &AtomicU64) -> f64 {
    shared.meters.iter().map(|meter| read(of(meter))).sum()
}

fn waits(all: &mut Families, shared: &Shared, standing: &Standing) {
    all.gauges(
        "farcell_parked_waits",
        "Waits that are parked at the server, queues counted, and waits that sleep in shared \
         memory, as their clients say.",
        &[
            (&[("where", "server")], standing.parked as f64),
            (&[("where", "memory")], standing.sleeping as f64),
        ],
    );
    all.gauges(
        "farcell_queued_claims",
        "Claims that queue for a lock or for a permit of a semaphore.",
        &[
            (&[("kind", "lock")], standing.queued[0] as f64),
            (&[("kind", "semaphore")], standing.queued[1] as f64),
        ],
    );
    let (mut below, mut buckets) = (0, Vec::new());
    let count = |i: usize| shared.meters.iter().map(|m| m.wakes[i].load(Ordering::Relaxed)).sum();
    for (i, bound) in WAKE_BOUNDS.into_iter().enumerate() {
        let here: u64 = count(i);
        below += here;
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(bound as f64 / 1e9);
        bucket.set_cumulative_count(below);
        buckets.push(bucket);
    }
    let longer: u64 = count(WAKE_BOUNDS.len());
    let mut histogram = Histogram::default();
    histogram.set_bucket(buckets);
    histogram.set_sample_count(below + longer);
    histogram.set_sample_sum(meters(shared, |meter| &meter.wake_time) / 1e9);
    let mut metric = Metric::default();
    metric.set_histogram(histogram);
    all.push(
        "farcell_wakeup_seconds",
        "From the moment that the server hears of a change, by a request, a ring, a doorbell or \
         its own sweep, to the answer of a parked wait being written. Those who sleep in shared \
         memory are woken without the server.",
        MetricType::HISTOGRAM,
        vec![metric],
    );
    let events = &shared.engine.events;
    all.counter(
        "farcell_peers_lost_total",
        "Peers with a name whose session ended without being released.",
        read(&events.lost),
    );
    all.counter(
        "farcell_peer_lost_told_total",
        "Waits that ended because a peer that they named was lost.",
        read(&events.told),
    );
}

fn contents(all: &mut Families, shared: &Shared, standing: &Standing) {
    let [capacity, free, largest] = standing.cells.map(|cells| cells as f64);
    all.gauge("farcell_segment_cells", "Cells that the segment has.", capacity);
    all.gauge(
        "farcell_segment_cells_used",
        "Cells that arrays have, their padding counted, and those of removed arrays that a client may still reach.",
        capacity - free,
    );
    all.gauge(
        "farcell_segment_largest_free_cells",
        "Cells of the largest free piece: the largest array that can still be made.",
        largest,
    );
    all.gauge(
        "farcell_payload_bytes",
        "Bytes that the messages of all arrays of slots have, those counted that were never written.",
        standing.payload[0] as f64,
    );
    all.gauge(
        "farcell_payload_limit_bytes",
        "The most bytes that the messages of all arrays may take up.",
        standing.payload[1] as f64,
    );
    let kinds = Kind::ALL.map(|kind| ([("kind", kind.name())], kind));
    let values: Vec<_> = kinds
        .iter()
        .map(|(labels, kind)| (&labels[..], standing.arrays[*kind as usize] as f64))
        .collect();
    all.gauges("farcell_arrays", "Arrays that exist.", &values);
    all.gauge("farcell_locks_held", "Locks that are held.", standing.locks_held as f64);
    let events = &shared.engine.events;
    all.counter(
        "farcell_locks_abandoned_total",
        "Locks that the server took from sessions that had ended without unlocking them.",
        read(&events.abandoned),
    );
    all.gauge(
        "farcell_barriers_broken",
        "Barriers that are broken and have not been reset.",
        standing.barriers_broken as f64,
    );
    all.counter(
        "farcell_barriers_broken_total",
        "Barriers that the server broke because a party of them had gone.",
        read(&events.broken),
    );
    let tolls = &shared.tolls;
    all.counters(
        "farcell_snapshots_total",
        "Snapshots that were written, or not.",
        &[
            (&[("result", "written")], read(&tolls.snapshots[0])),
            (&[("result", "failed")], read(&tolls.snapshots[1])),
        ],
    );
    let at = tolls.snapshot_at.load(Ordering::Relaxed);
    if at > 0 {
        let age = shared.started.elapsed().as_secs_f64() - at as f64 / 1e9;
        all.gauge(
            "farcell_snapshot_age_seconds",
            "How long ago the last snapshot was whole; absent until there is one.",
            age.max(0.0),
        );
        all.gauge(
            "farcell_snapshot_duration_seconds",
            "How long the last snapshot took.",
            read(&tolls.snapshot_took) / 1e9,
        );
    }
}

fn traffic(all: &mut Families, shared: &Shared) {
    let both = |requests: fn(&Meter) -> &AtomicU64, messages: fn(&Meter) -> &AtomicU64| {
        (meters(shared, requests), meters(shared, messages))
    };
    let received = both(|m| &m.bytes_in, |m| &m.message_bytes_in);
    let sent = both(|m| &m.bytes_out, |m| &m.message_bytes_out);
    let (session, messages): (Labels<'_>, Labels<'_>) =
        (&[("connection", "session")], &[("connection", "messages")]);
    all.counters(
        "farcell_received_bytes_total",
        "Bytes that came over TCP, over the connections of sessions and those for messages. What \
         RDMA and shared memory move is not here.",
        &[(session, received.0), (messages, received.1)],
    );
    all.counters(
        "farcell_sent_bytes_total",
        "Bytes that went over TCP, likewise.",
        &[(session, sent.0), (messages, sent.1)],
    );
    all.counters(
        "farcell_messages_total",
        "Messages of slots: writes that were committed and reads that were begun through the \
         server. Over RDMA and in shared memory clients also do that without it.",
        &[
            (&[("op", "write")], meters(shared, |m| &m.messages_in)),
            (&[("op", "read")], meters(shared, |m| &m.messages_out)),
        ],
    );
}
