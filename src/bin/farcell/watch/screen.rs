//! The terminal: a screen of our own, and colours.

use super::draw::{Line, Style};
use crate::failure::Failure;
use crate::output::plain;
use crossterm::cursor::{Hide, MoveTo, Show};
use crossterm::style::{Attribute, ContentStyle, PrintStyledContent, Stylize};
use crossterm::terminal::{Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen};
use crossterm::{QueueableCommand, terminal};
use std::io::{self, Write};

/// Width and height of the terminal. One that does not know has the usual ones.
pub fn size() -> (u16, u16) {
    terminal::size().ok().filter(|&(width, height)| width > 0 && height > 0).unwrap_or((80, 24))
}

/// A screen of our own. Dropped, it gives the terminal back as it was.
pub struct Screen {
    size: (u16, u16),
}

impl Screen {
    /// Takes the terminal.
    pub fn enter() -> Result<Screen, Failure> {
        let mut out = io::stdout().lock();
        // Dropped when something here fails.
        let screen = Screen { size: (0, 0) };
        out.queue(EnterAlternateScreen).and_then(|out| out.queue(Hide)).map_err(cannot)?;
        out.flush().map_err(cannot)?;
        Ok(screen)
    }

    /// Draws a frame over the one before, in one write.
    pub fn draw(&mut self, lines: &[Line]) -> Result<(), Failure> {
        let mut frame = Vec::new();
        let size = size();
        let frame_of = |frame: &mut Vec<u8>| -> io::Result<()> {
            if size != self.size {
                frame.queue(Clear(ClearType::All))?;
            }
            for (y, line) in (0..).zip(lines) {
                // Cleared first: behind a line as wide as the terminal it
                // would cost the last character.
                frame.queue(MoveTo(0, y))?.queue(Clear(ClearType::CurrentLine))?;
                put(frame, line)?;
            }
            if let Some(y) = u16::try_from(lines.len()).ok().filter(|&y| y < size.1) {
                frame.queue(MoveTo(0, y))?.queue(Clear(ClearType::FromCursorDown))?;
            }
            Ok(())
        };
        frame_of(&mut frame).map_err(cannot)?;
        self.size = size;
        let mut out = io::stdout().lock();
        out.write_all(&frame).and_then(|()| out.flush()).map_err(cannot)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let mut out = io::stdout().lock();
        // If the terminal is gone there is nothing to give back.
        let _ = out.queue(Show).and_then(|out| out.queue(LeaveAlternateScreen)).map(drop);
        let _ = out.flush();
    }
}

/// Prints lines where the cursor is.
pub fn print(lines: &[Line]) -> Result<(), Failure> {
    let mut text = Vec::new();
    for line in lines {
        put(&mut text, line).map_err(cannot)?;
        text.push(b'\n');
    }
    let mut out = io::stdout().lock();
    out.write_all(&text).and_then(|()| out.flush()).map_err(cannot)
}

fn put(out: &mut Vec<u8>, line: &Line) -> io::Result<()> {
    for (text, style) in line {
        out.queue(PrintStyledContent(look(*style).apply(text.as_str())))?;
    }
    Ok(())
}

fn look(style: Style) -> ContentStyle {
    let plain = ContentStyle::new();
    match style {
        Style::Plain => plain,
        Style::Title => plain.attribute(Attribute::Bold),
        Style::Faint => plain.attribute(Attribute::Dim),
        Style::Set => plain.green(),
        Style::Changed => plain.yellow().attribute(Attribute::Bold),
        Style::Waiters => plain.cyan(),
        Style::Trouble => plain.red().attribute(Attribute::Bold),
    }
}

fn cannot(e: io::Error) -> Failure {
    Failure::Other(format!("cannot draw on the terminal: {}", plain(&e)))
}
