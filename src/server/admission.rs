//! From a connection that anyone can make to a session for those who know a
//! key.

use super::connection::{Connection, Phase};
use super::meter::Turned;
use super::strangers::Stranger;
use super::worker::{FIRST_CLIENT, HANDSHAKE_TIME, TLS_COSTS, Worker};
use crate::auth::{self, BINDING_LEN, Binding, Denial, HELLO_LEN, MAGIC, ServerHandshake, Welcome};
use crate::engine::Newcomer;
use crate::tls;
use mio::net::TcpStream;
use mio::{Interest, Token};
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Worker {
    /// Sends a greeting to a client that has connected.
    pub(super) fn welcome_stranger(&mut self, stream: TcpStream, host: IpAddr) {
        let mut nonce = [0; 32];
        if let Err(error) = getrandom::fill(&mut nonce) {
            tracing::error!(%error, "no random numbers; a client is dropped");
            return;
        }
        self.serial = self.serial.wrapping_add(1);
        let serial = self.serial;
        let handshake = ServerHandshake::new(nonce, self.shared.tls);
        let greeting = handshake.greeting();
        let entry = self.clients.vacant_entry();
        let key = entry.key();
        let client = entry.insert(Connection::new(stream, serial, handshake));
        // Writable too: edge-triggered, it costs nothing until a send did not
        // fit.
        let interest = Interest::READABLE | Interest::WRITABLE;
        let token = Token(FIRST_CLIENT + key);
        let started = client
            .send(&greeting)
            .and_then(|()| self.poll.registry().register(client.stream(), token, interest));
        if let Err(error) = started {
            tracing::debug!(%error, "a client was gone before its greeting");
            self.clients.remove(key);
            return;
        }
        let stranger = Stranger { until: Instant::now() + HANDSHAKE_TIME, key, serial };
        if let Some(gone) = self.strangers.push(stranger, Some(host))
            && self.drop_stranger(gone.key, gone.serial, "made room for newer strangers")
        {
            self.shared.tolls.turn(Turned::Crowded);
        }
    }

    pub(super) fn handle_hello(&mut self, key: usize, bytes: &[u8]) -> usize {
        let client = &mut self.clients[key];
        let Phase::Handshake(handshake) = &client.phase else {
            return 0;
        };
        if let (Some(acceptor), Some(&tls::FIRST_BYTE)) = (&self.shared.acceptor, bytes.first())
            && !client.is_encrypted()
        {
            self.patience = self.patience.saturating_sub(TLS_COSTS);
            if let Err(error) = client.encrypt(acceptor, bytes) {
                tracing::debug!(%error, "no TLS with a stranger");
                self.shared.tolls.turn(Turned::Stranger);
                self.close(key, "speaks no TLS that is spoken here");
            }
            return bytes.len();
        }
        let n = bytes.len().min(MAGIC.len());
        if bytes[..n] != MAGIC[..n] {
            self.shared.tolls.turn(Turned::Stranger);
            self.close(key, "is no farcell client");
            return 0;
        }
        let Some((hello, rest)) = bytes.split_first_chunk::<HELLO_LEN>() else {
            return 0;
        };
        // What comes by TLS comes when its handshake is over, so that there is one.
        let ours = client.binding();
        let theirs = rest.first_chunk::<BINDING_LEN>().map(|bytes| Binding::new(*bytes));
        let bound = match (&theirs, &ours) {
            (Some(theirs), Some(ours)) => Some((theirs, ours)),
            (None, _) if client.is_encrypted() => return 0,
            _ => None,
        };
        let len = if bound.is_some() { HELLO_LEN + BINDING_LEN } else { HELLO_LEN };
        let handshake = handshake.clone();
        let denial = match handshake.hello(hello, bound, &self.shared.keys, self.shared.job) {
            Ok(proven) if self.is_full_for(&proven) => Denial::Full,
            Ok(proven) => {
                self.admit(key, &handshake, &proven);
                return len;
            }
            Err(Some(denial)) => denial,
            Err(None) => {
                self.shared.tolls.turn(Turned::Stranger);
                self.close(key, "is no farcell client");
                return 0;
            }
        };
        self.shared.tolls.turn(denial.into());
        let complain = self.may_complain();
        let client = &mut self.clients[key];
        let peer = client.stream().peer_addr().ok();
        if complain {
            tracing::warn!(?peer, "refused a client: {denial}");
        }
        client.queue(&auth::denial(denial));
        self.finish(key);
        len
    }

    /// Whether there is no place for this client. Who has a session already
    /// needs none.
    pub(super) fn is_full_for(&self, proven: &auth::Proven) -> bool {
        let engine = &self.shared.engine;
        // Relaxed: as where they are counted.
        let lapsed = self.shared.lapsed.load(Ordering::Relaxed);
        engine.sessions() + lapsed >= self.shared.most_clients && !engine.has(proven.resume.session)
    }

    pub(super) fn admit(&mut self, key: usize, handshake: &ServerHandshake, proven: &auth::Proven) {
        let Ok(fresh) = getrandom::u64() else {
            self.close(key, "came when there were no random numbers");
            return;
        };
        let serial = self.clients[key].serial;
        let resume = proven.resume;
        if resume.beside {
            return self.admit_beside(key, handshake, proven, self.welcome(proven));
        }
        let now = self.shared.incarnation;
        // Of another life of this state: what is left of the session is that
        // which the state keeps.
        let former = resume.incarnation != now && resume.incarnation >> 32 == now >> 32;
        let newcomer = Newcomer {
            access: proven.access,
            resume: (resume.incarnation == now || former).then_some(resume.session),
            next_request: resume.next_request,
            fresh: fresh.max(1),
            route: self.route(key, serial),
        };
        let (engine, now) = (&self.shared.engine, self.shared.now());
        let taken_up = match former {
            true => engine.take_up(&newcomer, now, &mut self.out),
            false => None,
        };
        let attached = taken_up.unwrap_or_else(|| {
            let newcomer = Newcomer { resume: newcomer.resume.filter(|_| !former), ..newcomer };
            engine.attach(&newcomer, now, &mut self.out)
        });
        let welcome = Welcome {
            resumed: attached.resumed,
            session: attached.id,
            seat: attached.seat,
            ..self.welcome(proven)
        };
        let bytes = handshake.welcome(proven, &welcome, &self.shared.keys);
        self.clients[key].phase = Phase::Open { session: attached.session, id: attached.id };
        tracing::debug!(session = attached.id, resumed = attached.resumed, "a client is in");
        self.send(key, &bytes);
        self.post_out();
    }

    /// What any client is told that was let in.
    fn welcome(&self, proven: &auth::Proven) -> Welcome {
        Welcome {
            access: proven.access,
            domain: self.shared.domain,
            resumed: false,
            offers_rdma: self.shared.rdma.is_some(),
            offers_shm: self.shared.shm.is_ok(),
            incarnation: self.shared.incarnation,
            session: 0,
            seat: 0,
            capacity: self.shared.capacity.into(),
            lease_ms: self.shared.lease.as_millis() as u64,
        }
    }
}
