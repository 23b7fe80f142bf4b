//! What a client and its handles share, and which way its operations go.

use super::{Client, TransportChoice, TransportReport};
use crate::auth::Domain;
use crate::engine::Way;
use crate::error::{Error, Result};
use crate::transport::rdma::{self, Rdma, RdmaSettings};
use crate::transport::shm::{Quicker, Shm};
use crate::transport::tcp::Link;
use crate::transport::{Failure, Follower, Transport, fell};
use crate::wire::Tag;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// What a client and its handles share.
#[derive(Debug)]
pub(super) struct Core {
    /// The session and its control connection.
    pub link: Arc<Link>,
    /// The way to the cells.
    pub transport: Arc<dyn Transport>,
    /// The same, if it is shared memory.
    pub shm: Option<Arc<Shm>>,
    /// The same, or what lies under it, if it is RDMA.
    rdma: Option<Arc<Rdma>>,
    /// Where the adapter makes the changes: what lies under shared memory.
    quicker: Option<Arc<Quicker>>,
    /// Why it is not a better one.
    reasons: Vec<String>,
    /// No better one was asked for.
    only_tcp: bool,
}

impl Core {
    /// The queue pairs, if there are any.
    pub fn rdma(&self) -> Option<&Rdma> {
        self.rdma.as_deref()
    }

    /// The same, to be kept.
    pub fn shared_rdma(&self) -> Option<&Arc<Rdma>> {
        self.rdma.as_ref()
    }

    /// Whether a change of a cell is done without asking the server.
    pub fn is_one_sided(&self) -> bool {
        self.shm.as_ref().is_some_and(|shm| shm.changes_now())
            || self.rdma.as_ref().is_some_and(|rdma| rdma.is_one_sided())
    }

    /// Chooses the way to the cells.
    pub fn open(link: Arc<Link>, choice: TransportChoice, settings: &RdmaSettings) -> Result<Core> {
        let mut core = Core {
            transport: link.clone(),
            link,
            shm: None,
            rdma: None,
            quicker: None,
            reasons: Vec::new(),
            only_tcp: choice == TransportChoice::Tcp,
        };
        if core.only_tcp {
            let why = "tcp was asked for";
            core.reasons.push(why.to_owned());
            fell::tell(&core.link, Way::Shm, why);
            fell::tell(&core.link, Way::Rdma, why);
            return Ok(core);
        }
        // In the domain of an adapter changes go through it, also those of one
        // who looks into the memory by itself.
        let here = choice != TransportChoice::Rdma;
        if !here || core.link.welcome().domain == Domain::Hca {
            core.open_rdma(choice, settings)?;
        }
        if here {
            if let Some(rdma) = &core.rdma {
                core.quicker = Some(Arc::new(Quicker::new(rdma.clone(), core.link.clone())));
            }
            let under = match &core.quicker {
                Some(quicker) => quicker.clone(),
                None => core.transport.clone(),
            };
            match Shm::open(&core.link, under) {
                Ok(shm) => {
                    core.transport = shm.clone();
                    core.shm = Some(shm);
                    return Ok(core);
                }
                // Dropping the core ends the session.
                Err(why) if choice == TransportChoice::Shm => return Err(Error::Shm { why }),
                Err(why) => {
                    fell::tell(&core.link, Way::Shm, &why);
                    core.reasons.insert(0, format!("no shared memory: {why}"));
                }
            }
            if core.rdma.is_none() && core.link.welcome().domain != Domain::Hca {
                core.open_rdma(choice, settings)?;
            }
        }
        Ok(core)
    }

    fn open_rdma(&mut self, choice: TransportChoice, settings: &RdmaSettings) -> Result<()> {
        let opened = match &settings.kept_off {
            Some(why) => Err(vec![why.clone()]),
            None => Rdma::open(&self.link, settings),
        };
        match opened {
            Ok(rdma) => {
                let rdma = Arc::new(rdma);
                let follower: Weak<dyn Follower> = Arc::downgrade(&rdma) as _;
                self.link.follow(follower);
                self.transport = rdma.clone();
                self.rdma = Some(rdma);
                Ok(())
            }
            Err(mut reasons) if choice == TransportChoice::Rdma => {
                reasons.extend(rdma::lacking(&self.link));
                Err(Error::Rdma { what: reasons.join("; ") })
            }
            Err(reasons) => {
                // A library that is not there is why, whatever the server offers.
                let lacking = rdma::lacking(&self.link);
                let why = lacking.unwrap_or_else(|| reasons.join("; "));
                fell::tell(&self.link, Way::Rdma, &why);
                self.reasons.extend(reasons.into_iter().map(|why| format!("no RDMA: {why}")));
                Ok(())
            }
        }
    }

    /// By which way operations go right now, and why.
    pub fn transport_report(&self) -> TransportReport {
        let mut under = self.report();
        if self.link.is_encrypted() {
            under.reasons.push("what goes over TCP is encrypted (TLS 1.3)".to_owned());
        }
        match self.shm.as_ref().map(|shm| shm.report()) {
            Some(Ok(what)) => {
                let changes_here = self.shm.as_ref().is_some_and(|shm| shm.changes());
                let changes = match (&self.quicker, under.name) {
                    (Some(quicker), "rdma") => quicker.report(),
                    _ => "changes by the server".to_owned(),
                };
                let further = std::iter::once(changes).chain(under.reasons);
                let reasons =
                    std::iter::once(what).chain(further.filter(|_| !changes_here)).collect();
                TransportReport { name: "shm", reasons }
            }
            Some(Err(why)) => {
                let mut reasons = vec![format!("shared memory was lost: {why}")];
                reasons.extend(under.reasons);
                TransportReport { name: under.name, reasons }
            }
            None => under,
        }
    }

    /// Goes to the cells and back by the way in use.
    pub fn try_out(&self) -> Result<()> {
        if let Some(shm) = self.shm.as_ref().filter(|shm| shm.report().is_ok()) {
            return shm.try_out().map_err(|why| Error::Shm { why });
        }
        if let Some(rdma) = self.rdma().filter(|rdma| rdma.state().is_ok()) {
            return rdma.try_out().map_err(|what| Error::Rdma { what });
        }
        self.link.ask(Tag::GetInfo, "").map(drop).map_err(|failure| match failure {
            Failure::Error(error) => error,
            Failure::Refused(refusal, _) => {
                Error::Protocol { addr: self.link.addr(), what: format!("it refused: {refusal:?}") }
            }
        })
    }

    /// How changes go where they do not go through memory.
    fn report(&self) -> TransportReport {
        match self.rdma.as_ref().map(|rdma| rdma.state()) {
            Some(Ok(what)) => {
                let mut reasons = vec![what];
                reasons.extend(self.reasons.iter().cloned());
                TransportReport { name: "rdma", reasons }
            }
            Some(Err(why)) => {
                TransportReport { name: "tcp", reasons: vec![format!("rdma was lost: {why}")] }
            }
            None => {
                let mut reasons = self.reasons.clone();
                if !self.only_tcp && self.shm.is_none() {
                    reasons.extend(rdma::lacking(&self.link));
                }
                TransportReport { name: "tcp", reasons }
            }
        }
    }
}

impl Client {
    /// Goes to the cells and back by the way in use, and says how long that took:
    /// over TCP a question to the server, over RDMA a READ of the segment's header
    /// and a compare-and-swap and a fetch-and-add on a word that is no cell, on
    /// each queue pair, in shared memory a look into it. Changes no cell. Blocks as
    /// an operation does.
    ///
    /// # Errors
    /// [`Error::Unreachable`]; [`Error::Rdma`] and [`Error::Shm`] where that way
    /// does not work; [`Error::Forked`].
    pub fn round_trip(&self) -> Result<Duration> {
        self.core.link.check()?;
        let begun = Instant::now();
        self.core.try_out()?;
        Ok(begun.elapsed())
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.link.close();
    }
}
