//! Barriers.

mod later;

use super::array::{Array, array_handle};
use super::options::WaitOptions;
use crate::cell::sync::{ANY_STAGE, Barrier as Word};
use crate::cell::{Comparison, Op};
use crate::engine::{Gone, lock};
use crate::error::{Error, Parted, Result};
use crate::layout::Run;
use crate::transport::Failure;
use crate::wire::{self, BrokenRecord, PartyRecord, Refusal, Tag, WaitRecord};
use std::sync::Arc;
use std::time::Duration;

/// A named array of barriers, `rows` x `cols`, all for the same number of
/// parties. A handle: cheap to clone, and indexing it is arithmetic.
#[derive(Clone, Debug)]
pub struct BarrierArray {
    array: Arc<Array>,
}

array_handle!(BarrierArray, Barrier, "barrier");

/// One barrier, as Python's `threading.Barrier`: as many wait at it as it has
/// parties, then all go on, again and again.
///
/// Each session that has waited at it is a party of it from then on. When the
/// session of a party is lost, because its process was killed or was silent for
/// its lease, the barrier is broken: those who wait, and those who come, get
/// [`Error::BarrierBroken`], which names it, until someone
/// [resets](Self::reset) it. A party that closes its client while nobody waits
/// for it leaves in peace. A server that is killed and comes back with its state
/// has its barriers whole, and those who waited go on to wait.
///
/// What each party did before it came is visible to all that have passed
/// (release and acquire).
#[derive(Clone, Debug)]
pub struct Barrier {
    array: Arc<Array>,
    offset: u32,
    row: usize,
    col: usize,
}

/// That a [`Barrier`] was passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BarrierWait {
    index: usize,
    generation: u64,
    last: bool,
}

impl BarrierWait {
    /// In which place it was reached, from 0 to one less than the parties: each
    /// one once. Good for choosing one of them.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// How often the barrier had been passed before, since it was reset.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether this was the one for whom the others waited.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.last
    }
}

impl Barrier {
    fn new(array: &Arc<Array>, offset: u32, row: usize, col: usize) -> Barrier {
        Barrier { array: array.clone(), offset, row, col }
    }

    /// Waits until all parties have come. The arrival is one round trip, over
    /// RDMA and in shared memory one atomic; who comes last goes on at once, and
    /// wakes those who wait in shared memory by itself. The first time that a
    /// session waits here takes one round trip more.
    ///
    /// # Errors
    /// [`Error::BarrierBroken`]; as [`Event::take`](crate::Event::take), and if the
    /// outcome is unknown the barrier is broken; [`Error::LeaseLost`] if the session was lost while it waited, which has
    /// broken the barrier.
    pub fn wait(&self) -> Result<BarrierWait> {
        self.wait_with_options(&WaitOptions::new())
    }

    /// As [`wait`](Self::wait), for this long at most. When the time is over the
    /// barrier is broken, for all.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_timeout(&self, timeout: Duration) -> Result<BarrierWait> {
        self.wait_with_options(&WaitOptions::new().timeout(timeout))
    }

    /// As [`wait`](Self::wait), with options. Whatever ends the wait before all
    /// have come breaks the barrier.
    ///
    /// # Errors
    /// As [`wait`](Self::wait); [`Error::Cancelled`], [`Error::PeerLost`].
    pub fn wait_with_options(&self, options: &WaitOptions) -> Result<BarrierWait> {
        let (session, found, passed) = self.arrive()?;
        if passed.last {
            return Ok(passed);
        }
        let woken = self.array.wait_bound(self.wait_record(found), options, session);
        self.conclude(session, found, passed, woken)
    }

    /// Comes to it: in which session, the word before, and what it means to have
    /// passed.
    fn arrive(&self) -> Result<(u64, Word, BarrierWait)> {
        let parties = self.array.form.param;
        let (session, arrived) = loop {
            let session = self.be_a_party()?;
            match self.array.attempt(Op::Arrive, self.offset, session, parties) {
                // The session is another one since: once more, as a party in that.
                Err(Failure::Refused(Refusal::StaleSeat, _)) => {
                    lock(&self.array.parties).remove(&self.offset);
                }
                arrived => break (session, arrived),
            }
        };
        let found = match arrived.map_err(|f| self.array.explain(f, Op::Arrive.name())) {
            Ok(word) => Word::of(word),
            Err(error) => {
                // It may count as having come, and will not come again: the
                // others must know.
                if matches!(error, Error::OutcomeUnknown { .. }) {
                    let _ = self.abort();
                }
                return Err(error);
            }
        };
        if found.broken {
            return Err(self.broken(found.epoch));
        }
        let passed = BarrierWait {
            index: found.index(parties) as usize,
            generation: found.arrivals / parties,
            last: found.index(parties) + 1 == parties,
        };
        Ok((session, found, passed))
    }

    /// What who has found this word waits for.
    fn wait_record(&self, found: Word) -> WaitRecord {
        WaitRecord {
            array: self.array.number,
            comparison: Comparison::Ge as u8,
            reserved: 0,
            run: Run::one(self.offset).into(),
            value: found.goal(self.array.form.param) as i64,
        }
    }

    /// What became of a wait in this session: the word that ended it, if the time was
    /// not over. Unless all have come it breaks the barrier.
    fn conclude(
        &self,
        session: u64,
        found: Word,
        passed: BarrierWait,
        woken: Result<Option<u64>>,
    ) -> Result<BarrierWait> {
        let parties = self.array.form.param;
        let (word, error) = match woken {
            Ok(Some(word)) => (word, None),
            Ok(None) => {
                let why = "a party did not wait any longer".to_owned();
                let error = self.error(None, why);
                (self.execute(Op::Break, found.stage(parties))?, Some(error))
            }
            // The server has done it.
            Err(error @ (Error::LeaseLost { .. } | Error::Closed | Error::ArrayRemoved { .. })) => {
                return Err(error);
            }
            Err(error) => {
                // The others must not wait for one that has gone.
                match self.execute(Op::Break, found.stage(parties)) {
                    Ok(word) => (word, Some(error)),
                    Err(_) => return Err(error),
                }
            }
        };
        let now = Word::of(word);
        match error {
            Some(error) if now.stage(parties) == found.stage(parties) && !now.broken => Err(error),
            Some(error @ Error::PeerLost { .. }) if now.broken => Err(error),
            _ if now.epoch != found.epoch => {
                Err(self.error(None, "it was reset while this party waited".to_owned()))
            }
            _ if now.broken => {
                let broken = self.broken(now.epoch);
                // In memory one sees what the end of one's own session does to it.
                if self.array.client.core.link.welcome().session != session {
                    let what =
                        format!("barrier {:?} ({}, {})", self.array.name, self.row, self.col);
                    return Err(Error::LeaseLost { what });
                }
                Err(broken)
            }
            _ => Ok(passed),
        }
    }

    /// Breaks it, for those who wait and those who come. One round trip.
    ///
    /// # Errors
    /// As [`Event::set`](crate::Event::set).
    pub fn abort(&self) -> Result<()> {
        self.execute(Op::Break, ANY_STAGE).map(drop)
    }

    /// Makes it whole again. Those who wait get [`Error::BarrierBroken`]. Two
    /// round trips.
    ///
    /// # Errors
    /// As [`Event::set`](crate::Event::set).
    pub fn reset(&self) -> Result<()> {
        let epoch = self.word()?.epoch;
        self.execute(Op::Reset, epoch).map(drop)
    }

    /// How many pass it together.
    #[must_use]
    pub fn parties(&self) -> usize {
        self.array.form.param as usize
    }

    /// How many wait. One round trip.
    ///
    /// # Errors
    /// As [`Event::is_set`](crate::Event::is_set).
    pub fn n_waiting(&self) -> Result<usize> {
        let word = self.word()?;
        Ok(if word.broken { 0 } else { word.index(self.array.form.param) as usize })
    }

    /// Whether nobody can pass it. One round trip.
    ///
    /// # Errors
    /// As [`Event::is_set`](crate::Event::is_set).
    pub fn is_broken(&self) -> Result<bool> {
        Ok(self.word()?.broken)
    }

    fn word(&self) -> Result<Word> {
        self.execute(Op::Load, 0).map(Word::of)
    }

    fn execute(&self, op: Op, a: u64) -> Result<u64> {
        self.array.execute(op, self.offset, a as i64, self.array.form.param as i64)
    }

    /// Tells the server that this session is a party, once. Which session it is.
    fn be_a_party(&self) -> Result<u64> {
        let link = &self.array.client.core.link;
        let session = link.welcome().session;
        if lock(&self.array.parties).get(&self.offset) == Some(&session) {
            return Ok(session);
        }
        link.request(Tag::Party, "wait at a barrier", bytemuck::bytes_of(&self.record(0)))
            .map_err(|f| self.array.explain(f, "wait at a barrier"))?;
        lock(&self.array.parties).insert(self.offset, session);
        Ok(session)
    }

    fn record(&self, epoch: u64) -> PartyRecord {
        PartyRecord { array: self.array.number, reserved: 0, offset: self.offset, epoch }
    }

    /// That it is broken, and who did it, if the server knows.
    fn broken(&self, epoch: u64) -> Error {
        let record = self.record(epoch);
        let link = &self.array.client.core.link;
        let Ok(bytes) = link.request(Tag::WhoBroke, "wait", bytemuck::bytes_of(&record)) else {
            return self.error(None, "a party is gone".to_owned());
        };
        let told = wire::take::<BrokenRecord>(Tag::Broken, &bytes).ok();
        let known = told.and_then(|(record, name)| Some((Gone::from_code(record.how)?, name)));
        match known {
            Some((how, name)) => {
                let name = String::from_utf8_lossy(name).into_owned();
                let why = match Parted::from(how) {
                    Parted::Silent => format!("party {name:?} is lost: {}", Parted::Silent),
                    _ => format!("party {name:?} has left while others waited for it"),
                };
                self.error(Some(name), why)
            }
            None => {
                self.error(None, "a party has aborted it or did not wait any longer".to_owned())
            }
        }
    }

    fn error(&self, by: Option<String>, why: String) -> Error {
        let (name, row, col) = (self.array.name.clone(), self.row, self.col);
        Error::BarrierBroken { name, row, col, by, why }
    }
}
