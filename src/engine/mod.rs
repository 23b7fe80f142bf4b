//! The server's mind, without sockets: requests in, replies and wake-ups out.
//!
//! The engine knows no socket, no thread and no clock. Whoever drives it hands
//! it frames and the time, and carries what it puts into [`Out`] to where it
//! belongs. Tests drive it by hand.
//!
//! It may be driven by several threads at once. Locks are taken in the order
//! session, catalog, then parking and peers, or journal; the table of sessions is
//! always the last one and held for a moment. Cells need no lock.
//!
//! A session ends in two steps. First it is over: its waits are gone, nothing of
//! it is carried out any more, and it stands in [`Out::ended`]. Then the driver
//! takes away what its client could reach the cells by, and calls
//! [`Engine::settle`], which frees what it held and tells those who rely on it.

mod actor;
mod brought;
mod counts;
mod former;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;
mod journal;
mod moment;
mod overview;
mod parking;
mod peers;
mod request;
mod session;
mod shelf;
mod slots;
#[cfg(feature = "metrics")]
mod standing;
mod sync;
#[cfg(test)]
mod tests;

pub use actor::{Actor, Swap};
pub use brought::Brought;
pub use counts::{Counts, Events};
pub use former::{Former, Formers, Left, Note, Roster, check_former};
pub use journal::Journal;
pub use moment::Moment;
pub use peers::{Gone, MAX_LOST, MAX_PEER_NAME, Way};
pub use request::Next;
pub use session::Route;
pub use shelf::{Kept, Shelf};
pub use slots::{Begun, SlotRow, Writing};
#[cfg(feature = "metrics")]
pub use standing::Standing;

use actor::replace_all;
use counts::add;
use peers::{Member, Peers};
use session::Session;
use shelf::Drafted;
use slots::Budget;

use crate::auth::Access;
use crate::catalog::{Catalog, CatalogError, Entry, Form};
use crate::wire::{self, BrokenRecord, FiredRecord, Refusal, Tag};
use crossbeam::utils::CachePadded;
use parking::{Done, Ended, Parking};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

/// Frames on their way out.
#[derive(Debug, Default)]
pub struct Out {
    /// To the client whose frames were handled, in order.
    pub reply: Vec<u8>,
    /// To other clients, or to the same one by way of its route.
    pub mail: Vec<(Route, Vec<u8>)>,
    /// Connections to close: their session has ended or moved elsewhere.
    pub close: Vec<Route>,
    /// Sessions that have ended, to be given to [`Engine::settle`] when their
    /// clients cannot reach the cells by themselves any more, and to be dropped
    /// then: with a session goes its hold on the cells of removed arrays, which
    /// may be given to another array from then on.
    pub ended: Vec<Over>,
    /// What whoever drives the engine with this has done.
    pub counts: Arc<CachePadded<Counts>>,
}

/// A session that has ended.
#[derive(Debug)]
pub struct Over {
    /// Its number.
    pub id: u64,
    /// Itself, as long as it may still hold cells.
    pub session: Option<SharedSession>,
}

/// A client that has proved to know a key.
#[derive(Clone, Copy, Debug)]
pub struct Newcomer {
    /// Which key it was.
    pub access: Access,
    /// The session that it had before.
    pub resume: Option<u64>,
    /// The number of its next request.
    pub next_request: u64,
    /// The number for its session if it gets a new one: not guessable, not 0.
    pub fresh: u64,
    /// Its connection.
    pub route: Route,
}

/// Bytes for messages unless told otherwise.
const DEFAULT_SLOT_BYTES: u64 = 1 << 30;

/// A session to work with, as the table hands it out.
pub type SharedSession = Arc<Mutex<Session>>;

/// What a new connection got.
#[derive(Debug)]
pub struct Attached {
    /// The session.
    pub session: SharedSession,
    /// Its number.
    pub id: u64,
    /// Whether it lived before.
    pub resumed: bool,
    /// Its seat.
    pub seat: u32,
}

/// The server's mind. See the [module](self).
#[derive(Debug)]
pub struct Engine<A> {
    actor: A,
    capacity: u32,
    lease: Duration,
    /// Clients may reach the cells of arrays that they have open by themselves.
    one_sided: bool,
    /// They may claim messages by themselves.
    claims_in_memory: bool,
    budget: Budget,
    catalog: RwLock<Catalog>,
    parking: Mutex<Parking>,
    /// Waits that are parked, so that nobody needs the lock to see that there
    /// is nothing to sweep.
    parked: AtomicUsize,
    /// Whether waiting bits are left to be put right; a hint as well.
    untidy: AtomicBool,
    peers: Mutex<Peers>,
    sessions: Mutex<HashMap<u64, SharedSession>>,
    /// Where arrays are noted, if they are to outlive the engine.
    journal: Option<Mutex<Box<dyn Journal>>>,
    /// Cells of arrays that were removed in a former life are still out of use.
    quarantine: AtomicBool,
    /// What has happened so far.
    pub events: Events,
}

/// A lock whose holder panicked: the data behind every lock here is whole
/// between any two statements that can panic, so it is taken all the same.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<A: Actor> Engine<A> {
    /// An engine over `capacity` cells of `actor`, whose sessions live for
    /// `lease` without a sign from their client.
    #[cfg(test)]
    pub fn new(actor: A, capacity: u32, lease: Duration) -> Engine<A> {
        Engine::with_catalog(actor, Catalog::new(capacity), lease)
    }

    /// An engine over the cells of `actor`, whose sessions live for `lease`
    /// without a sign from their client, with arrays from a former life, if
    /// there was one: their cells hold what they held. The cells of those that were removed in that life stay out of use
    /// until a lease has passed: by then every client of that life has come
    /// back or knows that it has lost its session.
    pub fn with_catalog(actor: A, catalog: Catalog, lease: Duration) -> Engine<A> {
        Engine {
            actor,
            capacity: catalog.capacity(),
            lease,
            one_sided: false,
            claims_in_memory: true,
            quarantine: AtomicBool::new(catalog.has_quarantine()),
            catalog: RwLock::new(catalog),
            budget: Budget::new(DEFAULT_SLOT_BYTES),
            parking: Mutex::default(),
            parked: AtomicUsize::new(0),
            untidy: AtomicBool::new(false),
            peers: Mutex::default(),
            sessions: Mutex::default(),
            journal: None,
            events: Events::default(),
        }
    }

    /// Clients may reach the cells of arrays that they have open by themselves:
    /// those of a removed array are given to no other one before all sessions
    /// that had it open have ended, or opened something else in its place.
    #[must_use]
    pub fn one_sided(mut self, yes: bool) -> Engine<A> {
        self.one_sided = yes;
        self
    }

    /// Clients may claim the rows of messages by themselves, in memory; they may
    /// unless told otherwise. If not, a row that is being written without a claim
    /// here is damaged, and becomes a torn one.
    #[must_use]
    pub fn claims_in_memory(mut self, yes: bool) -> Engine<A> {
        self.claims_in_memory = yes;
        self
    }

    /// Most bytes that the messages of all arrays of slots may take up.
    #[must_use]
    pub fn slot_bytes(mut self, most: u64) -> Engine<A> {
        self.budget = Budget::new(most);
        self
    }

    /// Most waits that one session may have.
    #[must_use]
    pub fn most_waits(mut self, most: usize) -> Engine<A> {
        self.parking = Mutex::new(Parking::with_most(most));
        self
    }

    /// Opens an array or makes it, as the server's own act.
    ///
    /// # Errors
    /// As [`Catalog::open_or_create`].
    pub fn open(&self, name: &str, form: Form) -> Result<(Arc<Entry>, bool), CatalogError> {
        let drafted = self.draft(name, form)?;
        let opened = self.open_with(name, form, drafted.as_ref());
        if let (Some(drafted), Err(_) | Ok((_, false))) = (&drafted, &opened) {
            self.budget.discard(drafted);
        }
        opened
    }

    fn open_with(
        &self,
        name: &str,
        form: Form,
        drafted: Option<&Drafted>,
    ) -> Result<(Arc<Entry>, bool), CatalogError> {
        let mut catalog = self.catalog.write().unwrap_or_else(PoisonError::into_inner);
        let mut late = None;
        let payload = || {
            if drafted.is_none() {
                // It was removed just now.
                late = self.budget.draft(form)?;
            }
            Ok(drafted.or(late.as_ref()).map(Drafted::payload))
        };
        let (entry, created) = catalog.open_or_create(name, form, payload)?;
        if created {
            let first = form.kind.first_word(form.param).unwrap_or(0);
            // Cells of an array that was removed before may hold anything.
            // Nobody else can reach them: the catalog is locked for writing.
            replace_all(&self.actor, entry.base..entry.base + entry.extent, first);
            let kept = drafted.or(late.as_ref()).map(|d| self.budget.keep(d, form, entry.base));
            if let Err(error) = kept.unwrap_or(Ok(())).and_then(|()| self.note_created(&entry)) {
                // Nobody has seen it.
                catalog.remove(name, false)?;
                self.budget.forget(&entry);
                return Err(error);
            }
        }
        Ok((entry, created))
    }

    /// Gives a connection its session: the one that it asks for if it lives
    /// and has the same access, a new one otherwise. The connection that had
    /// the session before is to be closed.
    pub fn attach(&self, newcomer: &Newcomer, now: Duration, out: &mut Out) -> Attached {
        // A statement of its own: the table must not stay locked below.
        let old =
            newcomer.resume.and_then(|id| Some((id, lock(&self.sessions).get(&id).cloned()?)));
        if let Some((id, session)) = old {
            let mut locked = lock(&session);
            // It may have ended between the look into the table and the lock.
            if locked.access == newcomer.access && !locked.ended {
                out.close.extend(locked.route.replace(newcomer.route));
                locked.hear(now);
                add(&self.events.resumed, 1);
                lock(&self.parking).reroute(id, Some(newcomer.route));
                let seat = locked.seat;
                drop(locked);
                return Attached { session, id, resumed: true, seat };
            }
        }
        let id = newcomer.fresh;
        let mut session = Session::new(id, newcomer.access, newcomer.next_request, now);
        session.route = Some(newcomer.route);
        let member = Member::new(id, newcomer.access == Access::ReadOnly, now);
        (session.heard, session.tally) = (member.heard.clone(), member.tally.clone());
        add(&self.events.begun, 1);
        session.seat = lock(&self.peers).sit_down(member);
        let seat = session.seat;
        let session = Arc::new(Mutex::new(session));
        lock(&self.sessions).insert(id, session.clone());
        Attached { session, id, resumed: false, seat }
    }

    /// The connection `route` of a session is gone. The session lives on until
    /// its lease ends, and its waits stay parked.
    pub fn detach(&self, session: &SharedSession, route: Route) {
        let mut session = lock(session);
        if session.route == Some(route) {
            session.route = None;
            lock(&self.parking).reroute(session.id, None);
        }
    }

    /// Ends a session: its waits are taken off their cells, and nothing of it
    /// can be resumed. A frame that a connection of it still holds finds it
    /// ended, and is not carried out.
    fn end(&self, session: &mut Session, how: Gone, out: &mut Out) {
        session.ended = true;
        add(&self.events.ended[how as usize], 1);
        let id = session.id;
        out.ended.push(Over { id, session: lock(&self.sessions).remove(&id) });
        let mut done = Vec::new();
        let mut parking = lock(&self.parking);
        if let Some(member) = lock(&self.peers).at(session.seat) {
            member.gone = Some(how);
            member.connected = session.route.is_some();
            member.may_hold = session.may_hold;
            let sleeps = self.actor.sleeps_of(session.id);
            let waits_at =
                |place: &&u32| sleeps.contains(place) || parking.is_parked_on(session.id, **place);
            member.arrived = member.parties.iter().filter(waits_at).copied().collect();
        }
        parking.end_session(&self.actor, session.id, &mut done);
        self.count(&parking);
        drop(parking);
        deliver(done, out);
    }

    /// To be called now and then: ends the sessions whose lease is over.
    pub fn expire(&self, now: Duration, out: &mut Out) {
        // Relaxed: a hint; the lock orders the rest.
        if now > self.lease && self.quarantine.swap(false, Ordering::Relaxed) {
            self.catalog.write().unwrap_or_else(PoisonError::into_inner).end_quarantine();
        }
        let table: Vec<SharedSession> = lock(&self.sessions).values().cloned().collect();
        for session in table {
            let mut session = lock(&session);
            if session.ended || now.saturating_sub(session.last_heard) <= self.lease {
                continue;
            }
            tracing::info!(session = session.id, "the lease of a session is over");
            out.close.extend(session.route);
            session.lapsed = true;
            self.end(&mut session, Gone::Silent, out);
        }
    }

    /// How many waits are parked.
    pub fn parked(&self) -> usize {
        // Relaxed: a hint. A wait that is parked right now is swept by the
        // next look.
        self.parked.load(Ordering::Relaxed)
    }

    /// How many wait by themselves, without the server's doing.
    pub fn sleepers(&self) -> usize {
        self.actor.sleepers(None)
    }

    /// To be called every few milliseconds while [`parked`](Self::parked) is
    /// not 0: wakes waiters whose mutator died before it could ring.
    pub fn sweep(&self, out: &mut Out) {
        let mut done = Vec::new();
        let mut parking = lock(&self.parking);
        parking.sweep(&self.actor, &mut done);
        self.count(&parking);
        drop(parking);
        deliver(done, out);
    }

    /// Whether [`mend`](Self::mend) has something to do.
    pub fn is_untidy(&self) -> bool {
        // Relaxed: a hint. The sweep finds what it misses.
        self.untidy.load(Ordering::Relaxed)
    }

    /// To be called between other things while [`is_untidy`](Self::is_untidy): a
    /// part of the work that large waits have left.
    pub fn mend(&self, out: &mut Out) {
        let mut done = Vec::new();
        let mut parking = lock(&self.parking);
        parking.mend(&self.actor, &mut done);
        self.count(&parking);
        drop(parking);
        deliver(done, out);
    }

    /// A way to a session's client has broken, and with it, perhaps, answers
    /// of waits: puts those on their way again that have not been acknowledged.
    pub fn repeat(&self, session: u64, out: &mut Out) {
        let done = lock(&self.parking).unacknowledged(session);
        deliver(done, out);
    }

    /// What a request of this session has done cannot be known: ends the
    /// session without an answer, and its client cannot take it up again.
    pub fn forget(&self, session: &mut Session, out: &mut Out) {
        out.reply.clear();
        out.close.extend(session.route);
        self.end(session, Gone::Closed, out);
    }

    /// Whether this session lives.
    pub fn has(&self, session: u64) -> bool {
        lock(&self.sessions).contains_key(&session)
    }

    /// How many sessions live.
    pub fn sessions(&self) -> usize {
        lock(&self.sessions).len()
    }

    fn count(&self, parking: &Parking) {
        self.parked.store(parking.len(), Ordering::Relaxed);
        self.untidy.store(parking.is_untidy(), Ordering::Relaxed);
    }
}

/// Puts the answers of waits on their way.
fn deliver(done: Vec<Done>, out: &mut Out) {
    for Done { id, route, ended } in done {
        if let Some(route) = route {
            let mut frame = Vec::new();
            push_ended(&mut frame, id.wait, &ended);
            out.mail.push((route, frame));
        }
    }
}

/// Appends the answer of a wait.
fn push_ended(out: &mut Vec<u8>, wait: u64, ended: &Ended) {
    let (tag, fired) = match ended {
        Ended::Satisfied(fired) => (Tag::Woken, fired),
        Ended::Cancelled(fired) => (Tag::Cancelled, fired),
        Ended::Granted(grant) => {
            let record = FiredRecord { index: 0, reserved: 0, word: grant.word };
            wire::push(out, Tag::Woken, wait, &[bytemuck::bytes_of(&record)]);
            return;
        }
        Ended::PeerLost(peer, loss) => {
            let ago_ms = u64::try_from(loss.ago.as_millis()).unwrap_or(u64::MAX);
            let record = BrokenRecord { how: loss.how as u8, reserved: [0; 7], ago_ms };
            let parts = [bytemuck::bytes_of(&record), peer.as_bytes()];
            wire::push(out, Tag::PeerLost, wait, &parts);
            return;
        }
        Ended::Removed => {
            let record = Refusal::NoArray.record(0);
            wire::push(out, Tag::WaitRefused, wait, &[bytemuck::bytes_of(&record)]);
            return;
        }
    };
    let size = size_of::<FiredRecord>();
    wire::push(out, tag, wait, &[]);
    let head = out.len() - wire::HEADER;
    for f in fired {
        let record = FiredRecord { index: f.index, reserved: 0, word: f.word };
        out.extend_from_slice(bytemuck::bytes_of(&record));
    }
    let len = (fired.len() * size) as u32;
    out[head..head + 4].copy_from_slice(&len.to_le_bytes());
}
