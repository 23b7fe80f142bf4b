//! Many operations on one trip.

use super::array::Array;
use super::counter::fits;
use super::{Client, Counter, Event};
use crate::cell::{self, Op};
use crate::error::{Error, Result};
use crate::transport::{CellOp, Failure};
use crate::wire::OpRecord;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Collects operations on any cells of a client's arrays and carries them out
/// in one round trip, in the order in which they were added.
///
/// Up to 32,768 operations travel as one request: if one of them is refused,
/// none is done. Other clients can come in between them; a batch saves trips,
/// it is no transaction. Over RDMA each operation is done by itself; there only
/// the removal of an array can refuse one of them, and those before it are done
/// then.
#[derive(Clone, Debug)]
pub struct Batch {
    client: Client,
    ops: Vec<CellOp>,
    /// The arrays of the operations, which keep their numbers as long as the
    /// batch lives.
    arrays: BTreeMap<u16, Arc<Array>>,
    /// What was wrong with the first bad operation that was added.
    error: Option<Error>,
}

/// What one operation of a batch found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    op: Op,
    word: u64,
}

impl Outcome {
    /// Of a counter: its value before the operation.
    #[must_use]
    pub fn value(&self) -> i64 {
        cell::value(self.word)
    }

    /// Of an event: whether it was set before the operation. For `take` this
    /// is its answer.
    #[must_use]
    pub fn was_set(&self) -> bool {
        cell::event_is_set(self.word)
    }

    /// Of an event: how many transitions it had made before the operation.
    #[must_use]
    pub fn transitions(&self) -> u64 {
        cell::value(self.word) as u64
    }

    /// Of `set`, `clear` and `take`: whether it changed the event.
    #[must_use]
    pub fn changed(&self) -> bool {
        match self.op {
            Op::Set => !self.was_set(),
            Op::Clear | Op::Take => self.was_set(),
            _ => false,
        }
    }
}

impl Batch {
    pub(super) fn new(client: Client) -> Batch {
        Batch { client, ops: Vec::new(), arrays: BTreeMap::new(), error: None }
    }

    /// How many operations it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    fn event(&mut self, event: &Event, op: Op) -> &mut Batch {
        self.check(&event.array);
        let array = event.array.number;
        self.ops.push(CellOp { op, array, offset: event.place.offset(), a: 0, b: 0 });
        self
    }

    fn counter(&mut self, counter: &Counter, op: Op, a: i64, b: i64) -> &mut Batch {
        self.check(&counter.array);
        if let Err(error) = fits(a).and_then(|()| fits(b)) {
            self.error.get_or_insert(error);
        }
        let (array, offset) = (counter.array.number, counter.place.offset());
        self.ops.push(CellOp { op, array, offset, a: a as u64, b: b as u64 });
        self
    }

    /// Handles of another client have numbers that mean nothing here.
    fn check(&mut self, array: &Arc<Array>) {
        self.arrays.entry(array.number).or_insert_with(|| array.clone());
        if !Arc::ptr_eq(&array.client.core, &self.client.core) {
            self.error.get_or_insert_with(|| Error::BadSelection {
                what: "a batch takes only handles of its own client".to_owned(),
            });
        }
    }

    /// Adds [`Event::set`].
    pub fn set(&mut self, event: &Event) -> &mut Batch {
        self.event(event, Op::Set)
    }

    /// Adds [`Event::clear`].
    pub fn clear(&mut self, event: &Event) -> &mut Batch {
        self.event(event, Op::Clear)
    }

    /// Adds [`Event::is_set`].
    pub fn is_set(&mut self, event: &Event) -> &mut Batch {
        self.event(event, Op::Load)
    }

    /// Adds [`Event::take`].
    pub fn take(&mut self, event: &Event) -> &mut Batch {
        self.event(event, Op::Take)
    }

    /// Adds [`Counter::load`].
    pub fn load(&mut self, counter: &Counter) -> &mut Batch {
        self.counter(counter, Op::Load, 0, 0)
    }

    /// Adds [`Counter::store`].
    pub fn store(&mut self, counter: &Counter, value: i64) -> &mut Batch {
        self.counter(counter, Op::Store, value, 0)
    }

    /// Adds [`Counter::fetch_add`].
    pub fn fetch_add(&mut self, counter: &Counter, delta: i64) -> &mut Batch {
        self.counter(counter, Op::Add, delta, 0)
    }

    /// Adds [`Counter::compare_exchange`]. It succeeded if the outcome's value
    /// is the expected one.
    pub fn compare_exchange(&mut self, counter: &Counter, expected: i64, new: i64) -> &mut Batch {
        self.counter(counter, Op::CompareExchange, expected, new)
    }

    /// Adds [`Counter::swap`].
    pub fn swap(&mut self, counter: &Counter, value: i64) -> &mut Batch {
        self.counter(counter, Op::Swap, value, 0)
    }

    /// Adds [`Counter::fetch_and`].
    pub fn fetch_and(&mut self, counter: &Counter, mask: i64) -> &mut Batch {
        self.counter(counter, Op::And, mask, 0)
    }

    /// Adds [`Counter::fetch_or`].
    pub fn fetch_or(&mut self, counter: &Counter, mask: i64) -> &mut Batch {
        self.counter(counter, Op::Or, mask, 0)
    }

    /// Adds [`Counter::fetch_xor`].
    pub fn fetch_xor(&mut self, counter: &Counter, mask: i64) -> &mut Batch {
        self.counter(counter, Op::Xor, mask, 0)
    }

    /// The operations as they go over the wire, and the numbers of their arrays,
    /// for a will of this client.
    pub(super) fn as_records(&self, client: &Client) -> Result<(Vec<OpRecord>, Vec<u16>)> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        if !Arc::ptr_eq(&client.core, &self.client.core) {
            let what = "a will takes only a batch of its own client".to_owned();
            return Err(Error::BadSelection { what });
        }
        let records = self.ops.iter().map(|&op| op.into()).collect();
        Ok((records, self.arrays.keys().copied().collect()))
    }

    /// Carries all of it out and returns what each operation found, in order.
    /// The batch keeps its operations and can be run again.
    ///
    /// # Errors
    /// The first thing that was wrong with an operation when it was added;
    /// otherwise as the operation that the server refused.
    pub fn run(&self) -> Result<Vec<Outcome>> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        if self.ops.is_empty() {
            return Ok(Vec::new());
        }
        let words = self.client.core.transport.execute_all(&self.ops);
        let words = words.map_err(|f| self.explain(f))?;
        Ok(self.ops.iter().zip(words).map(|(op, word)| Outcome { op: op.op, word }).collect())
    }

    /// A failure in terms of the operation that met it.
    pub(super) fn explain(&self, failure: Failure) -> Error {
        match failure {
            Failure::Error(error) => error,
            Failure::Refused(refusal, index) => {
                let op = self.ops.get(index as usize);
                match op.and_then(|op| Some((op, self.arrays.get(&op.array)?))) {
                    Some((op, array)) => {
                        array.explain(Failure::Refused(refusal, index), op.op.name())
                    }
                    None => self.client.senseless("a refusal of an unknown operation"),
                }
            }
        }
    }
}
