//! Many cells of one array at once.

use super::array::Array;
use super::options::WaitOptions;
use crate::cell::{self, Op};
use crate::error::{Error, Result};
use crate::layout::Run;
use crate::transport::tcp::Pending;
use crate::wire::{UNTIL_SET, WaitRecord};
use std::sync::Arc;

/// A cell that satisfied a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// Its row.
    pub row: usize,
    /// Its column.
    pub col: usize,
    pub(super) word: u64,
}

impl Cell {
    /// Of an event: how many transitions it had made when it satisfied the
    /// wait. Odd: it was set just then.
    #[must_use]
    pub fn transitions(&self) -> u64 {
        cell::value(self.word) as u64
    }

    /// Of a counter: its value when it satisfied the wait.
    #[must_use]
    pub fn value(&self) -> i64 {
        cell::value(self.word)
    }
}

/// How a wait for many cells ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Woken {
    pub(super) satisfied: bool,
    pub(super) cells: Vec<Cell>,
}

impl Woken {
    /// Whether as many cells as asked for satisfied the wait; otherwise its
    /// time was over.
    #[must_use]
    pub fn is_satisfied(&self) -> bool {
        self.satisfied
    }

    /// Which cells satisfied it, those counted that did when the time was
    /// over. Each is there once, in the order in which they were found.
    #[must_use]
    pub fn cells(&self) -> &[Cell] {
        &self.cells
    }
}

/// A selection of cells of an array: all, a row, a column, or a list.
#[derive(Clone, Debug)]
pub(super) struct Selection {
    pub array: Arc<Array>,
    pub runs: Vec<Run>,
    pub places: Places,
}

/// Row and column of each cell of a selection, in order.
#[derive(Clone, Debug)]
pub(super) enum Places {
    All { cols: usize },
    Row { row: usize },
    Column { col: usize },
    List(Vec<(usize, usize)>),
}

impl Selection {
    pub fn all(array: &Arc<Array>) -> Selection {
        let shape = array.form.shape;
        let runs = (0..shape.rows)
            .map(|row| Run {
                offset: (u64::from(row) * shape.pitch()) as u32,
                count: shape.cols,
                stride: 1,
            })
            .collect();
        Selection { array: array.clone(), runs, places: Places::All { cols: array.cols() } }
    }

    pub fn row(array: &Arc<Array>, row: usize) -> Result<Selection> {
        let offset = array.offset(row, 0)?;
        let runs = vec![Run { offset, count: array.form.shape.cols, stride: 1 }];
        Ok(Selection { array: array.clone(), runs, places: Places::Row { row } })
    }

    pub fn column(array: &Arc<Array>, col: usize) -> Result<Selection> {
        let offset = array.offset(0, col)?;
        let shape = array.form.shape;
        let runs = vec![Run { offset, count: shape.rows, stride: shape.pitch() as u32 }];
        Ok(Selection { array: array.clone(), runs, places: Places::Column { col } })
    }

    pub fn list(array: &Arc<Array>, cells: &[(usize, usize)]) -> Result<Selection> {
        if cells.is_empty() {
            let what = format!("an empty list of cells of array {:?}", array.name);
            return Err(Error::BadSelection { what });
        }
        let runs = cells
            .iter()
            .map(|&(row, col)| array.offset(row, col).map(Run::one))
            .collect::<Result<_>>()?;
        Ok(Selection { array: array.clone(), runs, places: Places::List(cells.to_vec()) })
    }

    pub fn len(&self) -> usize {
        self.runs.iter().map(|r| r.count as usize).sum()
    }

    pub fn cell(&self, index: usize) -> (usize, usize) {
        match &self.places {
            Places::All { cols } => (index / cols, index % cols),
            Places::Row { row } => (*row, index),
            Places::Column { col } => (index, *col),
            Places::List(cells) => cells[index],
        }
    }

    pub fn execute(&self, op: Op) -> Result<Vec<u64>> {
        self.array.execute_runs(op, &self.runs)
    }

    /// Waits until `need` cells compare to `value` as the wire's code says.
    pub fn wait(
        &self,
        need: usize,
        comparison: u8,
        value: i64,
        options: &WaitOptions,
    ) -> Result<Woken> {
        let records = self.wait_records(comparison, value);
        self.array.wait(need, &records, options, |i| self.cell(i))
    }

    fn wait_records(&self, comparison: u8, value: i64) -> Vec<WaitRecord> {
        let array = self.array.number;
        let record =
            |&run: &Run| WaitRecord { array, comparison, reserved: 0, run: run.into(), value };
        self.runs.iter().map(record).collect()
    }

    /// As [`wait`](Self::wait), with the answer given to `then`.
    pub fn wait_then(
        &self,
        need: usize,
        comparison: u8,
        value: i64,
        then: impl FnOnce(Result<Woken>) + Send + 'static,
    ) -> Result<Pending> {
        let here = self.clone();
        let records = self.wait_records(comparison, value);
        self.array.wait_then(need, &records, None, move |i| here.cell(i), then)
    }

    /// Waits until `need` events are set, or make a transition after this.
    pub fn wait_set(&self, need: usize, options: &WaitOptions) -> Result<Woken> {
        self.wait(need, UNTIL_SET, 0, options)
    }

    /// Waits until `need` cells have another value than the one given for
    /// each.
    pub fn wait_changed(&self, need: usize, seen: &[i64], options: &WaitOptions) -> Result<Woken> {
        if seen.len() != self.len() {
            let what = format!("{} values seen for {} cells", seen.len(), self.len());
            return Err(Error::BadSelection { what });
        }
        let array = self.array.number;
        let comparison = cell::Comparison::Ne as u8;
        let offsets = self.runs.iter().flat_map(|r| r.offsets());
        let records: Vec<WaitRecord> = offsets
            .zip(seen)
            .map(|(offset, &value)| WaitRecord {
                array,
                comparison,
                reserved: 0,
                run: Run::one(offset).into(),
                value,
            })
            .collect();
        self.array.wait(need, &records, options, |i| self.cell(i))
    }
}
