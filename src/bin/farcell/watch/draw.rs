//! An array as lines of a terminal. Nothing here writes.

use super::look::Look;
use farcell::Kind;

/// How a piece of text is to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Plain,
    Title,
    Faint,
    Set,
    Changed,
    Waiters,
    Trouble,
}

/// A line, as pieces of text.
pub type Line = Vec<(String, Style)>;

/// What is shown.
pub struct View {
    name: String,
    addr: String,
    /// What is wrong at the moment.
    pub state: Option<String>,
    look: Option<Look>,
    changed: Vec<bool>,
}

impl View {
    /// Nothing seen yet.
    pub fn new(name: &str, addr: &str) -> View {
        let (name, addr) = (name.to_owned(), addr.to_owned());
        View { name, addr, state: None, look: None, changed: Vec::new() }
    }

    /// Takes in a new look.
    pub fn show(&mut self, look: Look) {
        self.changed = match &self.look {
            Some(before) if look.is_like(before) => look.changes(Some(before)),
            // Nothing to compare with: nothing has changed before our eyes.
            _ => vec![false; look.numbers.len()],
        };
        self.look = Some(look);
        self.state = None;
    }

    /// The lines for a terminal of this size, none of them wider or more than
    /// fit.
    pub fn lines(&self, (width, height): (u16, u16)) -> Vec<Line> {
        let (width, height) = (usize::from(width), usize::from(height));
        let mut lines = vec![self.title()];
        if let Some(look) = &self.look {
            self.grid(look, width, height, &mut lines);
        }
        lines.truncate(height);
        for line in &mut lines {
            clip(line, width);
        }
        lines
    }

    fn title(&self) -> Line {
        let mut line = vec![(self.name.clone(), Style::Title)];
        if let Some(look) = &self.look {
            line.push((format!("  {} {} x {}", look.kind, look.rows, look.cols), Style::Plain));
        }
        line.push((format!("  at {}", self.addr), Style::Faint));
        match &self.state {
            Some(state) => line.push((format!("  {state}"), Style::Trouble)),
            None if self.look.is_none() => line.push(("  connecting".to_owned(), Style::Faint)),
            None => {}
        }
        line
    }

    fn grid(&self, look: &Look, width: usize, height: usize, lines: &mut Vec<Line>) {
        let label = (look.rows.max(1) - 1).to_string().len();
        let words: Vec<(String, String)> = (0..look.numbers.len()).map(|i| word(look, i)).collect();
        let widest = |f: fn(&(String, String)) -> usize| words.iter().map(f).max().unwrap_or(0);
        let (number, waiters) = (widest(|w| w.0.len()), widest(|w| w.1.len()));
        let head = (look.cols.max(1) - 1).to_string().len();
        // A gap, the cell, its waiters.
        let cell = 1 + number.max(head.saturating_sub(waiters)) + waiters;

        let mut cols = (width.saturating_sub(label) / cell).min(look.seen_cols);
        // Title, heads and legend.
        let mut rows = height.saturating_sub(3).min(look.seen_rows);
        let clipped = cols < look.cols || rows < look.rows;
        if clipped {
            rows = height.saturating_sub(4).min(look.seen_rows);
        }
        cols = cols.max(1);

        let heads = (0..cols).map(|c| {
            let pad = cell - waiters;
            format!("{c:>pad$}{:waiters$}", "")
        });
        lines.push(vec![(" ".repeat(label) + &heads.collect::<String>(), Style::Faint)]);
        for row in 0..rows {
            let mut line = vec![(format!("{row:>label$}"), Style::Faint)];
            for col in 0..cols {
                let i = row * look.seen_cols + col;
                let (number, parked) = &words[i];
                let pad = cell - waiters;
                line.push((format!("{number:>pad$}"), self.style(look, i)));
                line.push((format!("{parked:<waiters$}"), Style::Waiters));
            }
            lines.push(line);
        }
        lines.push(legend(look.kind));
        if clipped {
            let what = format!(
                "{rows} of {} rows and {cols} of {} columns fit this terminal",
                look.rows, look.cols
            );
            lines.push(vec![(what, Style::Trouble)]);
        }
    }

    fn style(&self, look: &Look, i: usize) -> Style {
        match (self.changed.get(i), look.is_on(i)) {
            (Some(true), _) => Style::Changed,
            (_, true) => Style::Set,
            (_, false) => Style::Faint,
        }
    }
}

/// A cell and its waiters, as words.
fn word(look: &Look, i: usize) -> (String, String) {
    let number = look.numbers[i];
    let cell = match look.kind {
        Kind::Event if look.is_on(i) => "#".to_owned(),
        Kind::Event => ".".to_owned(),
        _ => number.to_string(),
    };
    let waiters = match look.waiters.get(i) {
        None | Some(0) => String::new(),
        Some(n) => format!("*{n}"),
    };
    (cell, waiters)
}

fn legend(kind: Kind) -> Line {
    let mut line = Line::new();
    if kind == Kind::Event {
        line.push(("#".to_owned(), Style::Set));
        line.push((" set  ".to_owned(), Style::Faint));
        line.push((". clear  ".to_owned(), Style::Faint));
    }
    line.push(("changed".to_owned(), Style::Changed));
    line.push((" since the last look  ".to_owned(), Style::Faint));
    line.push(("*N".to_owned(), Style::Waiters));
    line.push((" waits parked".to_owned(), Style::Faint));
    line
}

/// Cuts a line to a width. Everything that we show has one column a character.
fn clip(line: &mut Line, width: usize) {
    let mut left = width;
    for (text, _) in line.iter_mut() {
        if let Some((end, _)) = text.char_indices().nth(left) {
            text.truncate(end);
        }
        left -= text.chars().count();
    }
    line.retain(|(text, _)| !text.is_empty());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(kind: Kind, rows: usize, cols: usize, numbers: &[i64]) -> Look {
        let waiters = vec![0; numbers.len()];
        let numbers = numbers.to_vec();
        Look { kind, rows, cols, seen_rows: rows, seen_cols: cols, numbers, waiters }
    }

    fn text(lines: &[Line]) -> Vec<String> {
        let join = |line: &Line| line.iter().map(|(text, _)| text.as_str()).collect::<String>();
        lines.iter().map(|line| join(line).trim_end().to_owned()).collect()
    }

    #[test]
    fn events_with_waiters() {
        let mut view = View::new("go", "host:1");
        let mut first = look(Kind::Event, 2, 3, &[0, 1, 2, 3, 4, 5]);
        first.waiters[0] = 12;
        view.show(first.clone());
        let lines = text(&view.lines((80, 24)));
        assert_eq!(lines[0], "go  event 2 x 3  at host:1");
        assert_eq!(lines[1], "  0    1    2");
        assert_eq!(lines[2], "0 .*12 #    .");
        assert_eq!(lines[3], "1 #    .    #");
        assert_eq!(lines.len(), 5);
        assert!(view.changed.iter().all(|c| !c));

        // Set and cleared again between two looks is a change.
        first.numbers[2] = 4;
        view.show(first);
        assert_eq!(view.changed, [false, false, true, false, false, false]);
        let changed = (" .".to_owned(), Style::Changed);
        assert!(view.lines((80, 24))[2].contains(&changed));
    }

    #[test]
    fn counters_are_aligned() {
        let mut view = View::new("n", "host:1");
        view.show(look(Kind::Counter, 1, 3, &[-5, 1000, 0]));
        assert_eq!(text(&view.lines((80, 24)))[1..3], ["     0    1    2", "0   -5 1000    0"]);
    }

    #[test]
    fn nothing_is_larger_than_the_terminal() {
        let mut view = View::new("large", "host:1");
        view.show(look(Kind::Counter, 50, 50, &[123_456; 2500]));
        view.state = Some("reconnecting".to_owned());
        for width in (0..120).step_by(7) {
            for height in (0..60).step_by(3) {
                let lines = view.lines((width, height));
                assert!(lines.len() <= height.into());
                for line in text(&lines) {
                    assert!(line.chars().count() <= width.into(), "{line:?}");
                }
            }
        }
        let lines = text(&view.lines((40, 10)));
        assert_eq!(lines.last().unwrap(), "6 of 50 rows and 5 of 50 columns fit thi");
    }

    #[test]
    fn trouble_keeps_what_was_seen() {
        let mut view = View::new("go", "host:1");
        assert_eq!(text(&view.lines((80, 24))), ["go  at host:1  connecting"]);
        view.show(look(Kind::Event, 1, 1, &[1]));
        view.state = Some("reconnecting".to_owned());
        let lines = text(&view.lines((80, 24)));
        assert_eq!(lines[0], "go  event 1 x 1  at host:1  reconnecting");
        assert_eq!(lines[2], "0 #");
    }
}
