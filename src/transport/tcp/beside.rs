//! Connections for messages, beside the session's own: whoever reads or writes
//! a message has one for itself meanwhile, and the system moves the bytes
//! between the socket and the caller's own memory.

use super::super::connect::{connect, plain};
use super::super::interrupt;
use super::super::socket::Socket;
use super::Failure;
use super::link::Link;
use crate::auth::{Resume, Tenure};
use crate::engine::lock;
use crate::error::{Error, seconds};
use crate::slot::Version;
use crate::wire::slots::{
    self, ANSWER, BEGIN, COMMIT, DATA, KEEP, MAX_BESIDE, REMOTE, SlotReply, SlotRequest, SlotTag,
    WRITTEN,
};
use crate::wire::{ErrorRecord, HEADER, Header, Refusal, Tag};
use rustix::net::RecvFlags;
use std::collections::BTreeSet;
use std::io::{self, IoSlice};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// A socket that is silent for this long is asked after.
const LOOK: Duration = Duration::from_millis(200);
/// Between two attempts to get a connection.
const PAUSE: Duration = Duration::from_millis(20);
/// How long to wait for one of a client's connections when it uses as many as
/// it may.
const QUEUE: Duration = Duration::from_secs(5);

/// Where a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotAt {
    /// The session's number of the array.
    pub array: u16,
    /// The row.
    pub row: u32,
}

/// What one look at a message has brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// Bytes of one whole message.
    Got {
        /// Its version.
        version: Version,
        /// How long it is.
        total: u64,
        /// How many of its bytes there are.
        bytes: usize,
    },
    /// There was no whole message: being written, torn, never written, or
    /// changed meanwhile, in which case the version is whole.
    Unsettled(Version),
}

/// The connections that a link has, and the writes that it has under way.
#[derive(Debug, Default)]
pub(super) struct Pool {
    inner: Mutex<Inner>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    /// Those that nobody uses.
    idle: Vec<Connection>,
    /// How many are in use.
    out: u32,
    last_write: u64,
    /// Writes whose end is not known yet.
    writes: BTreeSet<u64>,
}

/// A connection for messages.
#[derive(Debug)]
struct Connection {
    socket: Socket,
    /// The session that it belongs to.
    tenure: Tenure,
    /// The session's own connection when this one was taken.
    control: Option<Arc<Socket>>,
}

/// Why something was not done by a connection.
enum Trouble {
    /// The connection is of no use any more: another one may be.
    Lost(String),
    /// The server refused. The connection can be used again.
    Refused(Failure),
    /// It makes no sense.
    Broken(Failure),
}

/// A connection that is in use. Dropping it closes it.
#[derive(Debug)]
struct Taken {
    link: Arc<Link>,
    connection: Option<Connection>,
}

impl Taken {
    fn get(&mut self) -> Result<&mut Connection, Trouble> {
        self.connection.as_mut().ok_or_else(|| Trouble::Lost("it was lost before".to_owned()))
    }

    /// Others may use it.
    fn give_back(mut self) {
        if let Some(mut connection) = self.connection.take() {
            connection.control = None;
            lock(&self.link.pool.inner).idle.push(connection);
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        // A forked child closes its copy of the socket, and counts nothing.
        if !self.link.is_ours() {
            return;
        }
        lock(&self.link.pool.inner).out -= 1;
        self.link.pool.freed.notify_one();
    }
}

/// The number of a write, as long as its end is not known.
#[derive(Debug)]
pub(crate) struct Number {
    link: Arc<Link>,
    write: u64,
    oldest: u64,
}

impl Number {
    fn new(link: &Arc<Link>) -> Result<Number, Failure> {
        // A forked child would give out those of its parent.
        link.check()?;
        let mut inner = lock(&link.pool.inner);
        inner.last_write += 1;
        let write = inner.last_write;
        inner.writes.insert(write);
        let oldest = inner.writes.first().copied().unwrap_or(write);
        Ok(Number { link: link.clone(), write, oldest })
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        if self.link.is_ours() {
            lock(&self.link.pool.inner).writes.remove(&self.write);
        }
    }
}

impl Connection {
    /// Whether it is still worth waiting for: the session's own connection,
    /// which the keeper looks after, is the one that there was.
    fn is_alive(&self, link: &Link) -> Result<(), Trouble> {
        let state = lock(&link.state);
        if state.closed {
            return Err(Trouble::Broken(Error::Closed.into()));
        }
        match (&state.socket, &self.control) {
            (Some(now), Some(then)) if Arc::ptr_eq(now, then) => Ok(()),
            _ => Err(Trouble::Lost("the session's connection was lost".to_owned())),
        }
    }

    /// Whether it may still work although this came instead of bytes.
    fn goes_on(&self, link: &Link, error: &io::Error) -> Result<(), Trouble> {
        if interrupt::gives_up() {
            return Err(Trouble::Broken(Error::Cancelled.into()));
        }
        match error.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::WouldBlock => self.is_alive(link),
            _ => Err(Trouble::Lost(plain(error))),
        }
    }

    /// Sends a request, and bytes behind it.
    fn send(
        &self,
        link: &Link,
        tag: SlotTag,
        request: &SlotRequest,
        bytes: &[u8],
    ) -> Result<(), Trouble> {
        let mut head = Vec::with_capacity(slots::REQUEST);
        slots::push(&mut head, tag as u8, request);
        let mut sent = 0;
        while sent < head.len() + bytes.len() || self.socket.owes() {
            let rest = [
                IoSlice::new(head.get(sent..).unwrap_or_default()),
                IoSlice::new(&bytes[sent.saturating_sub(head.len())..]),
            ];
            match self.socket.send_parts(&rest) {
                Ok(n) => sent += n,
                Err(e) => self.goes_on(link, &e)?,
            }
        }
        Ok(())
    }

    /// Receives bytes until there are as many as that.
    fn receive(&self, link: &Link, into: &mut [u8]) -> Result<(), Trouble> {
        let mut filled = 0;
        while filled < into.len() {
            match self.socket.recv(&mut into[filled..], RecvFlags::WAITALL) {
                Ok(0) => {
                    return Err(Trouble::Lost("the server closed the connection".to_owned()));
                }
                Ok(n) => filled += n,
                Err(e) => self.goes_on(link, &e)?,
            }
        }
        Ok(())
    }

    /// Receives an answer, but for the bytes behind it.
    fn answer(&self, link: &Link, want: u8) -> Result<SlotReply, Trouble> {
        let mut bytes = [0; slots::REPLY];
        self.receive(link, &mut bytes)?;
        let header: Header = bytemuck::pod_read_unaligned(&bytes[..HEADER]);
        let record = &bytes[HEADER..];
        let senseless = |what: &str| Trouble::Broken(link.senseless(what));
        if header.len as usize != record.len() {
            return Err(senseless("an answer of another size about a message"));
        }
        if header.tag == want {
            return Ok(bytemuck::pod_read_unaligned(record));
        }
        if header.tag != Tag::Refused as u8 {
            return Err(senseless("an answer of another kind about a message"));
        }
        let record: ErrorRecord = bytemuck::pod_read_unaligned(record);
        match Refusal::from_record(&record) {
            Some(refusal) => Err(Trouble::Refused(Failure::Refused(refusal, 0))),
            None => Err(senseless("a refusal with an unknown code")),
        }
    }
}

impl Link {
    /// Takes a connection for messages, or makes one. Waits as any operation
    /// does while the session has none itself.
    fn take_beside(&self, begun: Instant) -> Result<Taken, Failure> {
        self.check()?;
        let Some(link) = self.me.upgrade() else {
            return Err(Error::Closed.into());
        };
        let queued = Instant::now();
        let mut inner = lock(&self.pool.inner);
        while inner.out >= MAX_BESIDE {
            if queued.elapsed() > QUEUE {
                let what = format!(
                    "a client reads and writes {MAX_BESIDE} messages at a time, and all of its connections for them are in use; end some writes first"
                );
                return Err(Error::Limit { addr: self.addr(), what }.into());
            }
            inner = match self.pool.freed.wait_timeout(inner, LOOK) {
                Ok((inner, _)) => inner,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        inner.out += 1;
        drop(inner);
        let mut taken = Taken { link, connection: None };
        let mut why = None;
        loop {
            let (control, welcome, down) = {
                let state = lock(&self.state);
                if state.closed {
                    return Err(Error::Closed.into());
                }
                (state.socket.clone(), state.welcome, state.down.as_ref().map(|d| d.why.clone()))
            };
            if control.is_some() {
                let mut inner = lock(&self.pool.inner);
                inner.idle.retain(|c| c.tenure == welcome.tenure());
                let connection = inner.idle.pop();
                drop(inner);
                if let Some(connection) = connection {
                    taken.connection = Some(Connection { control, ..connection });
                    return Ok(taken);
                }
                let resume = Resume {
                    incarnation: welcome.incarnation,
                    session: welcome.session,
                    next_request: 0,
                    beside: true,
                };
                match connect(&self.settings.target, resume) {
                    Ok((socket, made)) if made.resumed => {
                        let look = Some(LOOK);
                        socket
                            .set_read_timeout(look)
                            .and_then(|()| socket.set_write_timeout(look))
                            .map_err(|e| Error::os("setting up a connection", e))?;
                        let tenure = welcome.tenure();
                        taken.connection = Some(Connection { socket, tenure, control });
                        return Ok(taken);
                    }
                    Ok(_) => why = Some("the server knows no such session".to_owned()),
                    Err(Error::Unreachable { why: w, .. }) => why = Some(w),
                    Err(Error::ServerFull { .. }) => {
                        why = Some("the server takes no more connections".to_owned());
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            if begun.elapsed() >= self.settings.reconnect_for {
                let time = seconds(self.settings.reconnect_for);
                let last = down.or(why).unwrap_or_default();
                let why = format!("no connection for messages for {time}: {last}");
                return Err(Error::Unreachable { addr: self.addr(), why }.into());
            }
            if interrupt::gives_up() {
                return Err(Error::Cancelled.into());
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Does something by a connection for messages, and does it again by
    /// another one when that is lost.
    fn beside<T>(
        &self,
        mut work: impl FnMut(&Link, &Connection) -> Result<T, Trouble>,
    ) -> Result<T, Failure> {
        let mut begun = Instant::now();
        let mut tries = 0;
        loop {
            let mut taken = self.take_beside(begun)?;
            match taken.get().and_then(|connection| work(self, connection)) {
                Ok(done) => {
                    taken.give_back();
                    return Ok(done);
                }
                Err(Trouble::Refused(failure)) => {
                    taken.give_back();
                    return Err(failure);
                }
                Err(Trouble::Broken(failure)) => return Err(failure),
                Err(Trouble::Lost(why)) => {
                    tracing::debug!(target: "farcell::tcp", why, "a connection for messages was lost");
                    drop(taken);
                    if tries == 0 {
                        // Patience is with what is lost, not with what is long.
                        begun = Instant::now();
                    } else if begun.elapsed() >= self.settings.reconnect_for {
                        return Err(Error::Unreachable { addr: self.addr(), why }.into());
                    } else {
                        std::thread::sleep(PAUSE);
                    }
                    tries += 1;
                }
            }
        }
    }

    /// Looks at a message once: brings its bytes from `offset` on.
    pub(crate) fn slot_look(
        &self,
        at: SlotAt,
        offset: u64,
        into: &mut [u8],
    ) -> Result<Look, Failure> {
        let request = SlotRequest {
            array: at.array,
            row: at.row,
            offset,
            bytes: into.len() as u64,
            ..SlotRequest::default()
        };
        self.beside(|link, connection| {
            connection.send(link, SlotTag::Read, &request, &[])?;
            let reply = connection.answer(link, DATA)?;
            let version = Version::of(reply.word);
            let bytes = usize::try_from(reply.bytes).unwrap_or(usize::MAX);
            let Some(into) = into.get_mut(..bytes) else {
                return Err(Trouble::Broken(link.senseless("more of a message than asked for")));
            };
            let mut after = version;
            if bytes > 0 {
                connection.receive(link, into)?;
                let mut word = [0; 8];
                connection.receive(link, &mut word)?;
                after = Version::of(u64::from_le_bytes(word));
            }
            let whole = !version.is_writing() && !version.is_torn() && version.number() > 0;
            Ok(match whole && after == version {
                true => Look::Got { version, total: reply.total, bytes },
                // A whole one says that another try may do.
                false => Look::Unsettled(if whole { after } else { version }),
            })
        })
    }

    /// Writes these bytes of a message, and makes it whole.
    pub(crate) fn slot_put(
        self: &Arc<Self>,
        at: SlotAt,
        offset: u64,
        bytes: &[u8],
        total: Option<u64>,
    ) -> Result<Version, Failure> {
        let number = Number::new(self)?;
        let request = SlotRequest {
            array: at.array,
            flags: BEGIN | COMMIT,
            row: at.row,
            write: number.write,
            oldest: number.oldest,
            offset,
            bytes: bytes.len() as u64,
            total: total.unwrap_or(KEEP),
        };
        // The same number each time: it is done once by one server, and again
        // by one that has lost what it had.
        let put = self.beside(|link, connection| {
            connection.send(link, SlotTag::Write, &request, bytes)?;
            Ok(Version::of(connection.answer(link, WRITTEN)?.word))
        });
        put.map_err(|failure| match failure {
            // It may have arrived.
            Failure::Error(Error::Cancelled) => {
                interrupt::given_up(self.addr(), "write", true).into()
            }
            failure => failure,
        })
    }

    /// Claims a row, to write its message in parts.
    pub(crate) fn slot_begin(self: &Arc<Self>, at: SlotAt) -> Result<Claimed, Failure> {
        match self.slot_begin_as(&self.slot_number()?, at, false)? {
            Begun::Claimed(claimed) => Ok(claimed),
            Begun::Done(_) => Err(self.senseless("a write that was done before it was begun")),
        }
    }

    /// A number for a write, to begin it under.
    pub(crate) fn slot_number(self: &Arc<Self>) -> Result<Arc<Number>, Failure> {
        Number::new(self).map(Arc::new)
    }

    /// Claims a row for a write that may have been begun before under this
    /// number, or even done. `remote`: its bytes come by RDMA.
    pub(crate) fn slot_begin_as(
        self: &Arc<Self>,
        number: &Arc<Number>,
        at: SlotAt,
        remote: bool,
    ) -> Result<Begun, Failure> {
        let mut request = SlotRequest {
            array: at.array,
            flags: BEGIN | ANSWER | if remote { REMOTE } else { 0 },
            row: at.row,
            write: number.write,
            oldest: number.oldest,
            ..SlotRequest::default()
        };
        let mut lost_since = None;
        loop {
            let mut taken = self.take_beside(lost_since.unwrap_or_else(Instant::now))?;
            let result = taken.get().and_then(|connection| {
                connection.send(self, SlotTag::Write, &request, &[])?;
                connection.answer(self, WRITTEN)
            });
            match result {
                Ok(SlotReply { word: 0, .. }) => {
                    request.flags = 0;
                    let number = number.clone();
                    let taken = Some(taken);
                    let elsewhere = false;
                    return Ok(Begun::Claimed(Claimed { taken, number, request, elsewhere }));
                }
                Ok(SlotReply { word, .. }) => {
                    taken.give_back();
                    return Ok(Begun::Done(Version::of(word)));
                }
                Err(Trouble::Refused(failure)) => {
                    taken.give_back();
                    return Err(failure);
                }
                Err(Trouble::Broken(failure)) => return Err(failure),
                Err(Trouble::Lost(why)) => {
                    let since = *lost_since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= self.settings.reconnect_for {
                        return Err(Error::Unreachable { addr: self.addr(), why }.into());
                    }
                    drop(taken);
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }

    /// Closes the connections that nobody uses.
    pub(super) fn close_beside(&self) {
        lock(&self.pool.inner).idle.clear();
    }
}

/// A row that is claimed, to be written in parts. Dropping it gives it up.
#[derive(Debug)]
pub(crate) struct Claimed {
    taken: Option<Taken>,
    number: Arc<Number>,
    request: SlotRequest,
    /// Its bytes go by another way, so that the end of its connection does not
    /// give it up.
    elsewhere: bool,
}

/// How a write has begun.
#[derive(Debug)]
pub(crate) enum Begun {
    /// The row is claimed for it.
    Claimed(Claimed),
    /// It is done: the version that it made.
    Done(Version),
}

impl Claimed {
    fn on<T>(
        &mut self,
        work: impl FnOnce(&Link, &Connection) -> Result<T, Trouble>,
    ) -> Result<T, Option<Failure>> {
        // The connection is one with its parent's in a forked child.
        self.number.link.check().map_err(|forked| Some(forked.into()))?;
        let Some(mut taken) = self.taken.take() else {
            return Err(None);
        };
        let link = taken.link.clone();
        match taken.get().and_then(|connection| work(&link, connection)) {
            Ok(done) => {
                self.taken = Some(taken);
                Ok(done)
            }
            Err(Trouble::Refused(failure)) => {
                taken.give_back();
                Err(Some(failure))
            }
            Err(Trouble::Broken(failure)) => Err(Some(failure)),
            Err(Trouble::Lost(_)) => Err(None),
        }
    }

    /// Sends bytes of the message. `Err(None)`: the claim is lost.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Option<Failure>> {
        let request = SlotRequest { offset, bytes: bytes.len() as u64, ..self.request };
        self.on(|link, connection| connection.send(link, SlotTag::Write, &request, bytes))
    }

    /// Tells the server, before the first part, that bytes go by another way: the
    /// row counts as touched from here on. `Err(None)`: the claim is lost.
    pub(crate) fn go_elsewhere(&mut self) -> Result<(), Option<Failure>> {
        let request = SlotRequest { flags: BEGIN | ANSWER | REMOTE, ..self.request };
        let begun = self.on(|link, connection| {
            connection.send(link, SlotTag::Write, &request, &[])?;
            connection.answer(link, WRITTEN)
        });
        self.elsewhere = true;
        begun.map(drop)
    }

    /// Whether its bytes go by another way.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.elsewhere
    }

    /// Tells of bytes that are in the row by another way. `Err(None)`: the claim is lost.
    pub(crate) fn arrived(&mut self, offset: u64, bytes: u64) -> Result<(), Option<Failure>> {
        let request = SlotRequest { flags: REMOTE, offset, bytes, ..self.request };
        self.on(|link, connection| connection.send(link, SlotTag::Write, &request, &[]))
    }

    /// Makes the message whole. `Err(None)`: the claim is lost.
    pub(crate) fn commit(mut self, total: Option<u64>) -> Result<Version, Option<Failure>> {
        match self.try_commit(total) {
            // Whether it was done, the server knows.
            Err(None) => {
                self.elsewhere = false;
                self.find_out()
            }
            other => other,
        }
    }

    /// As [`commit`](Self::commit), and `Err(None)` also when it may be done.
    pub(crate) fn try_commit(&mut self, total: Option<u64>) -> Result<Version, Option<Failure>> {
        let flags = COMMIT;
        let request = SlotRequest { flags, total: total.unwrap_or(KEEP), ..self.request };
        let written = self.on(|link, connection| {
            connection.send(link, SlotTag::Write, &request, &[])?;
            connection.answer(link, WRITTEN)
        });
        match written {
            Ok(reply) => {
                self.elsewhere = false;
                if let Some(taken) = self.taken.take() {
                    taken.give_back();
                }
                Ok(Version::of(reply.word))
            }
            Err(failure) => Err(failure),
        }
    }

    /// After a connection that was lost behind a commit.
    fn find_out(&self) -> Result<Version, Option<Failure>> {
        let request = SlotRequest { flags: BEGIN | ANSWER, ..self.request };
        let link = &self.number.link;
        let word = link.beside(|link, connection| {
            connection.send(link, SlotTag::Write, &request, &[])?;
            let reply = connection.answer(link, WRITTEN)?;
            if reply.word == 0 {
                // It was claimed anew, which is not what we want.
                connection.send(link, SlotTag::Abort, &self.request, &[])?;
                connection.answer(link, WRITTEN)?;
            }
            Ok(reply.word)
        });
        match word {
            Ok(0) => Err(None),
            Ok(word) => Ok(Version::of(word)),
            Err(failure) => Err(Some(failure)),
        }
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        // Nothing is sent in a forked child: `on` sees to it.
        let request = self.request;
        let answered = self.on(|link, connection| {
            connection.send(link, SlotTag::Abort, &request, &[])?;
            connection.answer(link, WRITTEN)
        });
        // Otherwise the server finds the connection closed, and does the same; but
        // it leaves what goes elsewhere to us.
        if matches!(answered, Err(None)) && self.elsewhere {
            let _ = self.find_out();
        }
        if answered.is_ok()
            && let Some(taken) = self.taken.take()
        {
            taken.give_back();
        }
    }
}
