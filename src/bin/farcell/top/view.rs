//! A model as it is drawn.

use super::input::Action;
use super::scene::{Cells, Model, Row, short};
use farcell::Kind;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Paragraph, Row as TableRow, Table, Wrap};
use std::time::Duration;

/// A part of the screen that can have the focus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Part {
    #[default]
    Arrays,
    Members,
    Waits,
}

const PARTS: [Part; 3] = [Part::Arrays, Part::Members, Part::Waits];

/// What the one who looks has chosen.
#[derive(Debug, Default)]
pub struct View {
    addr: String,
    focus: usize,
    zoomed: bool,
    pub paused: bool,
    /// The array that is shown.
    pub array: Option<String>,
    /// The first line that is shown of members and of waits.
    members: usize,
    waits: usize,
    /// How many rows and columns of cells there was room for.
    pub room: (usize, usize),
}

impl View {
    /// Of the server at this address.
    pub fn new(addr: &str) -> View {
        View { addr: addr.to_owned(), room: (24, 40), ..View::default() }
    }

    fn part(&self) -> Part {
        PARTS[self.focus % PARTS.len()]
    }

    /// Does what was asked for. Whether another array is to be looked at.
    pub fn act(&mut self, action: Action, model: &Model) -> bool {
        let by = match action {
            Action::Move(by) => by,
            Action::Edge(last) => {
                if last {
                    i32::MAX
                } else {
                    i32::MIN
                }
            }
            Action::Next(forward) => {
                let step = if forward { 1 } else { PARTS.len() - 1 };
                self.focus = (self.focus + step) % PARTS.len();
                return false;
            }
            Action::Zoom => {
                self.zoomed = !self.zoomed;
                return false;
            }
            Action::Pause => {
                self.paused = !self.paused;
                return !self.paused;
            }
            Action::Quit | Action::Redraw => return false,
        };
        let moved = |at: usize, count: usize| {
            let to = i64::try_from(at).unwrap_or(0) + i64::from(by);
            usize::try_from(to.max(0)).unwrap_or(0).min(count.saturating_sub(1))
        };
        match self.part() {
            Part::Members => {
                self.members = moved(self.members, model.rows().len());
                false
            }
            Part::Waits => {
                self.waits = moved(self.waits, model.waits().len());
                false
            }
            Part::Arrays => {
                let Some(scene) = model.scene().filter(|scene| !scene.arrays.is_empty()) else {
                    return false;
                };
                let to = moved(self.chosen(model), scene.arrays.len());
                self.array = Some(scene.arrays[to].name.clone());
                true
            }
        }
    }

    /// The place of the array that is shown in the list.
    fn chosen(&self, model: &Model) -> usize {
        let arrays = model.scene().map_or(&[][..], |scene| &scene.arrays);
        let named = |name: &String| arrays.iter().position(|array| array.name == *name);
        self.array.as_ref().and_then(named).unwrap_or(0)
    }

    /// Draws all of it.
    pub fn draw(&mut self, frame: &mut Frame<'_>, model: &Model, now: Duration) {
        let area = frame.area();
        let alarm = model.cycles().first().map(|cycle| format!(" DEADLOCK: {}", cycle.text));
        // All of it where there is room: who is in it stands to the end.
        let lines = alarm.as_ref().map_or(0, |text| lines_of(text, area.width));
        let [title, banner, body, keys] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(lines.min((area.height / 4).max(1))),
            Constraint::Min(0),
            Constraint::Length(1),
        ])
        .areas(area);
        frame.render_widget(self.title(model), title);
        if let Some(text) = alarm {
            let style = Style::new().fg(Color::White).bg(Color::Red).add_modifier(Modifier::BOLD);
            let wrap = Wrap { trim: false };
            frame.render_widget(Paragraph::new(text).style(style).wrap(wrap), banner);
        }
        let keys_of = "q quit  Tab part  Up/Down choose  z zoom  p pause";
        frame.render_widget(Paragraph::new(keys_of).style(faint()), keys);
        if self.zoomed {
            match self.part() {
                Part::Arrays => self.arrays(frame, body, model, now),
                Part::Members => self.members(frame, body, model),
                Part::Waits => self.waits(frame, body, model),
            }
            return;
        }
        let members = model.rows().len() as u16 + 3;
        let inner = body.width.saturating_sub(2);
        let texts = model.waits();
        let waits =
            texts.iter().fold(2_u16, |sum, (text, _)| sum.saturating_add(lines_of(text, inner)));
        let third = body.height / 3;
        let [arrays, people, chains] = Layout::vertical([
            Constraint::Min(4),
            Constraint::Length(members.clamp(4, third.max(4))),
            Constraint::Length(waits.clamp(3, third.max(3))),
        ])
        .areas(body);
        self.arrays(frame, arrays, model, now);
        self.members(frame, people, model);
        self.waits(frame, chains, model);
    }

    fn title(&self, model: &Model) -> Line<'static> {
        let mut line = vec![Span::styled("farcell top", bold())];
        line.push(Span::styled(format!("  {}", self.addr), faint()));
        // First what is wrong: the end of the line may not fit.
        match &model.trouble {
            Some(what) => line.push(Span::styled(format!("  {what}"), trouble())),
            None if model.scene().is_none() => line.push(Span::raw("  connecting")),
            None => {}
        }
        if self.paused {
            line.push(Span::styled("  paused", trouble()));
        }
        if let Some(scene) = model.scene() {
            let info = &scene.info;
            let used = info.capacity - info.free.min(info.capacity);
            line.push(Span::raw(format!(
                "  {} domain  {} sessions  {} waits  {} of {} cells",
                info.domain, info.sessions, info.parked_waits, used, info.capacity
            )));
        }
        Line::from(line)
    }

    fn frame_of(&self, part: Part, title: String) -> Block<'static> {
        let style = if self.part() == part { bold() } else { faint() };
        Block::bordered().title(title).border_style(style)
    }

    fn arrays(&mut self, frame: &mut Frame<'_>, area: Rect, model: &Model, now: Duration) {
        let widest = model.scene().map_or(0, |scene| {
            scene
                .arrays
                .iter()
                .map(|a| a.name.len() + a.form().to_string().len() + 4)
                .max()
                .unwrap_or(0)
        });
        let width = (widest as u16).clamp(16, (area.width / 2).max(16));
        let [list, map] =
            Layout::horizontal([Constraint::Length(width), Constraint::Min(0)]).areas(area);
        let block = self.frame_of(Part::Arrays, "arrays".to_owned());
        let inner = block.inner(list);
        let chosen = self.chosen(model);
        let arrays = model.scene().map_or(&[][..], |scene| &scene.arrays);
        let first = chosen.saturating_sub(usize::from(inner.height).saturating_sub(1));
        let lines: Vec<Line<'_>> = arrays
            .iter()
            .enumerate()
            .skip(first)
            .take(inner.height.into())
            .map(|(at, array)| {
                let style = if at == chosen { bold().fg(Color::Cyan) } else { Style::new() };
                Line::from(vec![
                    Span::styled(array.name.clone(), style),
                    Span::styled(format!("  {}", array.form()), faint()),
                ])
            })
            .collect();
        frame.render_widget(block, list);
        frame.render_widget(Paragraph::new(lines), inner);

        let cells = model.scene().and_then(|scene| scene.cells.as_ref());
        let title = match (cells, arrays.get(chosen)) {
            (Some(cells), _) => cells.name.clone(),
            (None, Some(array)) if array.kind == Kind::Slots => {
                format!("{}: messages are not drawn", array.name)
            }
            _ => String::new(),
        };
        let block = Block::bordered().title(title).border_style(faint());
        let inner = block.inner(map);
        frame.render_widget(block, map);
        // As many as could be seen if each were as small as a cell can be.
        self.room = (usize::from(inner.height), usize::from(inner.width / 2).max(1));
        if let Some(cells) = cells {
            frame.render_widget(Paragraph::new(heat(cells, model, now, inner)), inner);
        }
    }

    fn members(&self, frame: &mut Frame<'_>, area: Rect, model: &Model) {
        let rows = model.rows();
        let title = format!("members ({})", rows.len());
        let block = self.frame_of(Part::Members, title);
        let head = ["NAME", "SEAT", "WAY", "REQ/S", "HEARD", "HOLDS", "WAITS FOR"];
        let first = self.members.min(rows.len().saturating_sub(1));
        let lines = rows.iter().skip(first).map(table_row);
        let widths = [
            Constraint::Max(24),
            Constraint::Length(6),
            Constraint::Length(4),
            Constraint::Length(8),
            Constraint::Length(7),
            Constraint::Fill(1),
            Constraint::Fill(1),
        ];
        let table = Table::new(lines, widths)
            .header(TableRow::new(head).style(faint()))
            .column_spacing(1)
            .block(block);
        frame.render_widget(table, area);
    }

    fn waits(&self, frame: &mut Frame<'_>, area: Rect, model: &Model) {
        let waits = model.waits();
        let block = self.frame_of(Part::Waits, format!("who waits for whom ({})", waits.len()));
        let first = self.waits.min(waits.len().saturating_sub(1));
        let lines: Vec<Line<'_>> = waits
            .into_iter()
            .skip(first)
            .map(|(text, cycle)| {
                let style = if cycle { trouble() } else { Style::new() };
                Line::from(Span::styled(text, style))
            })
            .collect();
        let text = Paragraph::new(lines).wrap(Wrap { trim: false }).block(block);
        frame.render_widget(text, area);
    }
}

/// How many lines a text takes up where lines end between words.
fn lines_of(text: &str, width: u16) -> u16 {
    let width = usize::from(width).max(1);
    let (mut lines, mut at) = (1, 0);
    for word in text.split(' ') {
        let len = word.chars().count();
        if at > 0 && at + 1 + len > width {
            (lines, at) = (lines + 1, 0);
        }
        at += len + usize::from(at > 0);
        // A word that is longer than a line goes over several.
        lines += at.saturating_sub(1) / width;
        at -= at.saturating_sub(1) / width * width;
    }
    u16::try_from(lines).unwrap_or(u16::MAX)
}

fn table_row(row: &Row) -> TableRow<'static> {
    let holds = match (&row.fallback, row.holds.is_empty()) {
        (Some(why), true) if row.transport == "tcp" => why.clone(),
        _ => row.holds.clone(),
    };
    let rate = row.rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"));
    let cells = [
        row.name.clone(),
        row.seat.to_string(),
        row.transport.to_owned(),
        rate,
        short(row.last_heard),
        holds,
        row.waits.clone(),
    ];
    let style = if row.stuck { trouble() } else { Style::new() };
    TableRow::new(cells.map(Cell::from)).style(style)
}

fn faint() -> Style {
    Style::new().add_modifier(Modifier::DIM)
}

fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn trouble() -> Style {
    Style::new().fg(Color::Red).add_modifier(Modifier::BOLD)
}

/// How a cell looks: by what is in it, and by when that came to be.
fn warmth(on: bool, age: Option<Duration>) -> Style {
    match (age.map(|age| age.as_secs_f64()), on) {
        (Some(age), _) if age < 1.0 => bold().fg(Color::Black).bg(Color::Yellow),
        (Some(age), _) if age < 10.0 => Style::new().fg(Color::Yellow),
        (_, true) => Style::new().fg(Color::Green),
        (_, false) => faint(),
    }
}

/// The cells of an array, row by row, as many as fit.
fn heat(cells: &Cells, model: &Model, now: Duration, area: Rect) -> Vec<Line<'static>> {
    let words: Vec<String> = (0..cells.numbers.len()).map(|at| word(cells, at)).collect();
    let waiters = |at: usize| match cells.waiters.get(at) {
        None | Some(0) => String::new(),
        Some(n) => format!("*{n}"),
    };
    let marks: Vec<String> = (0..words.len()).map(waiters).collect();
    let widest = |texts: &[String]| texts.iter().map(String::len).max().unwrap_or(0);
    let (number, mark) = (widest(&words), widest(&marks));
    let label = cells.rows.saturating_sub(1).to_string().len();
    let cols = (usize::from(area.width).saturating_sub(label) / (1 + number + mark)).max(1);
    let mut lines = Vec::new();
    for row in 0..cells.rows.min(area.height.into()) {
        let mut line = vec![Span::styled(format!("{row:>label$}"), faint())];
        for col in 0..cells.cols.min(cols) {
            let at = row * cells.cols + col;
            line.push(Span::raw(" "));
            let style = warmth(cells.is_on(at), model.age(at, now));
            line.push(Span::styled(format!("{:>number$}", words[at]), style));
            let style = Style::new().fg(Color::Cyan);
            line.push(Span::styled(format!("{:<mark$}", marks[at]), style));
        }
        lines.push(Line::from(line));
    }
    lines
}

fn word(cells: &Cells, at: usize) -> String {
    match cells.kind {
        Kind::Event if cells.is_on(at) => "#".to_owned(),
        Kind::Event => ".".to_owned(),
        Kind::Lock if !cells.is_on(at) => ".".to_owned(),
        _ => cells.numbers[at].to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::graph::tests::{lock, member, wait};
    use super::super::scene::tests::{events, scene};
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn drawn(view: &mut View, model: &Model, (width, height): (u16, u16)) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view.draw(frame, model, Duration::from_secs(1))).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn all_parts_are_there() {
        let mut model = Model::default();
        let mut view = View::new("node0:7117");
        assert!(drawn(&mut view, &model, (100, 30)).contains("connecting"));
        let mut cells = events(&[1, 0, 3]);
        cells.waiters[1] = 2;
        model.show(scene(Some(cells)), Duration::from_secs(1));
        let screen = drawn(&mut view, &model, (100, 30));
        for what in ["node0:7117", "cpu domain", "go  event 1 x 3", "rank 0", "rank 1 (this view)"]
        {
            assert!(screen.contains(what), "{what}:\n{screen}");
        }
        assert!(screen.contains("0 #   .*2 #"), "{screen}");
        model.trouble = Some("reconnecting: connection refused".to_owned());
        assert!(drawn(&mut view, &model, (100, 30)).contains("reconnecting: connection refused"));
    }

    #[test]
    fn a_deadlock_is_named_to_its_end_where_lines_are_short() {
        let mut model = Model::default();
        let mut stuck = scene(None);
        stuck.members = (1..=3).map(|seat| member(seat, &format!("rank {seat}"))).collect();
        stuck.waits = (1..=3).map(|seat| wait(seat, Kind::Lock, "gate", seat as usize)).collect();
        stuck.held = vec![lock(1, 2), lock(2, 3), lock(3, 1)];
        model.show(stuck, Duration::ZERO);
        let mut view = View::new("node0:7117");
        let screen = drawn(&mut view, &model, (60, 24));
        let words = screen.replace(|c: char| !c.is_ascii_graphic() || c == '"', " ");
        let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
        let whole = "DEADLOCK: rank 1 waits for lock gate 0 1, held by rank 2; rank 2 waits for \
                     lock gate 0 2, held by rank 3; rank 3 waits for lock gate 0 3, held by rank 1";
        assert_eq!(words.matches(whole).count(), 2, "{screen}");
    }

    #[test]
    fn a_text_takes_up_lines() {
        for (text, lines) in [("", 1), ("1234", 1), ("1234 5", 2), ("1 2 3 4", 2), ("12345", 2)] {
            assert_eq!(lines_of(text, 4), lines, "{text:?}");
        }
        assert_eq!(lines_of("1 2", 0), 2, "no width at all");
    }

    #[test]
    fn no_size_is_too_small() {
        let mut model = Model::default();
        model.show(scene(Some(events(&[1, 0, 3]))), Duration::ZERO);
        let mut view = View::new("node0:7117");
        for zoomed in [false, true] {
            view.zoomed = zoomed;
            for size in [(1, 1), (2, 3), (10, 5), (20, 8), (500, 3), (3, 200)] {
                drawn(&mut view, &model, size);
            }
        }
    }

    #[test]
    fn moving_stays_inside() {
        let mut model = Model::default();
        let mut view = View::new("a:1");
        assert!(!view.act(Action::Move(1), &model), "there is nothing to choose");
        model.show(scene(None), Duration::ZERO);
        for action in [Action::Move(1), Action::Edge(true), Action::Edge(false)] {
            assert!(view.act(action, &model));
            assert_eq!(view.array.as_deref(), Some("go"));
        }
        view.act(Action::Next(true), &model);
        view.act(Action::Edge(true), &model);
        assert_eq!(view.members, 1);
        view.act(Action::Next(false), &model);
        assert_eq!(view.part(), Part::Arrays);
    }
}
