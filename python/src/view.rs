//! Which cells of an array a view has: arithmetic, as Python indexes.

use pyo3::exceptions::{PyIndexError, PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PySlice, PyTuple};

/// Indices along one side: a slice that has been cut to the array's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Axis {
    pub start: usize,
    pub step: isize,
    pub len: usize,
}

impl Axis {
    pub fn all(len: usize) -> Axis {
        Axis { start: 0, step: 1, len }
    }

    pub fn at(&self, index: usize) -> usize {
        self.start.wrapping_add_signed(self.step.wrapping_mul(index as isize))
    }

    fn one(&self, index: isize, what: &str) -> PyResult<usize> {
        let at = if index < 0 { index + self.len as isize } else { index };
        match usize::try_from(at) {
            Ok(at) if at < self.len => Ok(self.at(at)),
            _ => Err(PyIndexError::new_err(format!(
                "{what} {index} is out of range: there are {}",
                self.len
            ))),
        }
    }

    fn slice(&self, slice: &Bound<'_, PySlice>) -> PyResult<Axis> {
        let cut = slice.indices(self.len as isize)?;
        let first = if cut.slicelength == 0 { 0 } else { cut.start as usize };
        // A step that nothing takes may be as large as a number gets.
        let step = if cut.slicelength > 1 { self.step * cut.step } else { 1 };
        Ok(Axis { start: self.at(first), step, len: cut.slicelength })
    }
}

/// The cells of a view, and how it is indexed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum View {
    /// By row and column.
    Grid(Axis, Axis),
    /// A row, or a part of it.
    Row(usize, Axis),
    /// A column, or a part of it.
    Column(Axis, usize),
    /// The cells of a grid one behind another, row by row, those of `part`.
    Flat(Axis, Axis, Axis),
    /// Any cells.
    Picked(Vec<(usize, usize)>),
}

/// What an index leads to.
pub enum Found {
    Cell(usize, usize),
    View(View),
}

enum Index {
    One(isize),
    Part(Axis),
}

fn index(item: &Bound<'_, PyAny>, axis: &Axis) -> PyResult<Index> {
    if let Ok(slice) = item.cast::<PySlice>() {
        return axis.slice(slice).map(Index::Part);
    }
    // Whatever has __index__, numpy's integers among them.
    number(item).map(Index::One)
}

/// An index that is one number.
fn number(item: &Bound<'_, PyAny>) -> PyResult<isize> {
    item.extract::<isize>().map_err(|error| {
        if error.is_instance_of::<PyOverflowError>(item.py()) {
            return PyIndexError::new_err(format!("index {item} is out of range"));
        }
        PyTypeError::new_err("an index is an integer, a slice, a pair of these, or a list of pairs")
    })
}

impl View {
    pub fn whole(rows: usize, cols: usize, flat: bool) -> View {
        match flat {
            true => View::Row(0, Axis::all(cols)),
            false => View::Grid(Axis::all(rows), Axis::all(cols)),
        }
    }

    /// How many cells.
    pub fn cells(&self) -> usize {
        match self {
            View::Grid(rows, cols) => rows.len * cols.len,
            View::Row(_, axis) | View::Column(axis, _) | View::Flat(_, _, axis) => axis.len,
            View::Picked(cells) => cells.len(),
        }
    }

    /// What `len()` says.
    pub fn len(&self) -> usize {
        match self {
            View::Grid(rows, _) => rows.len,
            _ => self.cells(),
        }
    }

    pub fn shape(&self) -> Vec<usize> {
        match self {
            View::Grid(rows, cols) => vec![rows.len, cols.len],
            _ => vec![self.cells()],
        }
    }

    /// Row and column of the cell with this number, counted row by row.
    pub fn cell(&self, at: usize) -> (usize, usize) {
        match self {
            View::Grid(rows, cols) => (rows.at(at / cols.len), cols.at(at % cols.len)),
            View::Row(row, cols) => (*row, cols.at(at)),
            View::Column(rows, col) => (rows.at(at), *col),
            View::Flat(rows, cols, part) => {
                let at = part.at(at);
                (rows.at(at / cols.len), cols.at(at % cols.len))
            }
            View::Picked(cells) => cells[at],
        }
    }

    pub fn list(&self) -> Vec<(usize, usize)> {
        (0..self.cells()).map(|at| self.cell(at)).collect()
    }

    /// All of its cells one behind another.
    pub fn flat(&self) -> View {
        match self {
            View::Grid(rows, cols) => View::Flat(*rows, *cols, Axis::all(self.cells())),
            other => other.clone(),
        }
    }

    /// `view[item]`.
    pub fn index(&self, item: &Bound<'_, PyAny>) -> PyResult<Found> {
        // First what nearly every index is, and by its type: what cannot be
        // turned into a number costs an exception to find out.
        if let Ok(whole) = item.cast::<PyInt>() {
            return self.one(number(whole.as_any())?);
        }
        if let Ok(pair) = item.cast::<PyTuple>() {
            return self.pair(pair);
        }
        if let Ok(list) = item.cast::<PyList>() {
            return self.pick(list);
        }
        Ok(Found::View(match (self, index(item, &Axis::all(self.len()))?) {
            (_, Index::One(at)) => return self.one(at),
            (View::Grid(..), Index::Part(_)) => {
                let View::Grid(rows, cols) = self else { unreachable!("just looked") };
                let Index::Part(part) = index(item, rows)? else { unreachable!("it is a slice") };
                View::Grid(part, *cols)
            }
            (View::Row(row, cols), _) => match index(item, cols)? {
                Index::Part(part) => View::Row(*row, part),
                Index::One(at) => return self.one(at),
            },
            (View::Column(rows, col), _) => match index(item, rows)? {
                Index::Part(part) => View::Column(part, *col),
                Index::One(at) => return self.one(at),
            },
            (View::Flat(rows, cols, part), _) => match index(item, part)? {
                Index::Part(part) => View::Flat(*rows, *cols, part),
                Index::One(at) => return self.one(at),
            },
            (View::Picked(cells), Index::Part(part)) => {
                View::Picked((0..part.len).map(|at| cells[part.at(at)]).collect())
            }
        }))
    }

    fn one(&self, at: isize) -> PyResult<Found> {
        Ok(match self {
            View::Grid(rows, cols) => Found::View(View::Row(rows.one(at, "row")?, *cols)),
            View::Row(row, cols) => Found::Cell(*row, cols.one(at, "index")?),
            View::Column(rows, col) => Found::Cell(rows.one(at, "index")?, *col),
            View::Flat(rows, cols, part) => {
                let at = part.one(at, "index")?;
                Found::Cell(rows.at(at / cols.len), cols.at(at % cols.len))
            }
            View::Picked(cells) => {
                let at = Axis::all(cells.len()).one(at, "index")?;
                let (row, col) = cells[at];
                Found::Cell(row, col)
            }
        })
    }

    fn pair(&self, pair: &Bound<'_, PyTuple>) -> PyResult<Found> {
        let View::Grid(rows, cols) = self else {
            return Err(PyIndexError::new_err("one index is enough: this has one dimension"));
        };
        if pair.len() != 2 {
            let text = format!("{} indices for two dimensions", pair.len());
            return Err(PyIndexError::new_err(text));
        }
        let row = index(&pair.get_item(0)?, rows)?;
        let col = index(&pair.get_item(1)?, cols)?;
        Ok(match (row, col) {
            (Index::One(row), Index::One(col)) => {
                Found::Cell(rows.one(row, "row")?, cols.one(col, "column")?)
            }
            (Index::One(row), Index::Part(cols)) => {
                Found::View(View::Row(rows.one(row, "row")?, cols))
            }
            (Index::Part(rows), Index::One(col)) => {
                Found::View(View::Column(rows, cols.one(col, "column")?))
            }
            (Index::Part(rows), Index::Part(cols)) => Found::View(View::Grid(rows, cols)),
        })
    }

    fn pick(&self, list: &Bound<'_, PyList>) -> PyResult<Found> {
        let cells = list
            .iter()
            .map(|item| match item.cast::<PyList>() {
                // A list can hold itself, and no stack is deep enough for that.
                Ok(_) => Err(PyTypeError::new_err("a list of indices must not hold lists")),
                Err(_) => match self.index(&item)? {
                    Found::Cell(row, col) => Ok((row, col)),
                    Found::View(_) => {
                        Err(PyTypeError::new_err("a list of indices must name cells"))
                    }
                },
            })
            .collect::<PyResult<Vec<_>>>()?;
        if cells.is_empty() {
            return Err(PyValueError::new_err("an empty list of cells"));
        }
        Ok(Found::View(View::Picked(cells)))
    }
}
