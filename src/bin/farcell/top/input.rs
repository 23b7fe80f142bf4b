//! What keys mean. Pure.

use crossterm::event::{Event, KeyCode, KeyEventKind, KeyModifiers};

/// What someone wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The end.
    Quit,
    /// Up (less than 0) or down in the part that has the focus.
    Move(i32),
    /// To its first line (`false`) or its last.
    Edge(bool),
    /// The focus to the next part, or to the one before.
    Next(bool),
    /// All of the screen for the part that has the focus, or not any more.
    Zoom,
    /// No further looks, or again.
    Pause,
    /// Draw again: the terminal has another size.
    Redraw,
}

/// Lines of a page.
const PAGE: i32 = 10;

/// What an event means, if anything.
pub fn action(event: &Event) -> Option<Action> {
    let key = match event {
        Event::Resize(..) => return Some(Action::Redraw),
        Event::Key(key) if key.kind != KeyEventKind::Release => key,
        _ => return None,
    };
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    Some(match key.code {
        KeyCode::Char('c' | 'd') if control => Action::Quit,
        KeyCode::Char('l') if control => Action::Redraw,
        _ if control => return None,
        KeyCode::Char('q') => Action::Quit,
        KeyCode::Esc => Action::Quit,
        KeyCode::Up | KeyCode::Char('k') => Action::Move(-1),
        KeyCode::Down | KeyCode::Char('j') => Action::Move(1),
        KeyCode::PageUp => Action::Move(-PAGE),
        KeyCode::PageDown => Action::Move(PAGE),
        KeyCode::Home | KeyCode::Char('g') => Action::Edge(false),
        KeyCode::End | KeyCode::Char('G') => Action::Edge(true),
        KeyCode::Tab => Action::Next(true),
        KeyCode::BackTab => Action::Next(false),
        KeyCode::Enter | KeyCode::Char('z') => Action::Zoom,
        KeyCode::Char(' ' | 'p') => Action::Pause,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossterm::event::KeyEvent;

    #[test]
    fn keys_have_their_meanings() {
        let key = |code, modifiers| action(&Event::Key(KeyEvent::new(code, modifiers)));
        let none = KeyModifiers::NONE;
        assert_eq!(key(KeyCode::Char('q'), none), Some(Action::Quit));
        assert_eq!(key(KeyCode::Char('c'), KeyModifiers::CONTROL), Some(Action::Quit));
        assert_eq!(key(KeyCode::Char('c'), none), None);
        assert_eq!(key(KeyCode::Char('q'), KeyModifiers::CONTROL), None);
        assert_eq!(key(KeyCode::Down, none), Some(Action::Move(1)));
        assert_eq!(key(KeyCode::PageUp, none), Some(Action::Move(-10)));
        assert_eq!(key(KeyCode::BackTab, KeyModifiers::SHIFT), Some(Action::Next(false)));
        assert_eq!(action(&Event::Resize(80, 24)), Some(Action::Redraw));
        let mut up = KeyEvent::new(KeyCode::Char('q'), none);
        up.kind = KeyEventKind::Release;
        assert_eq!(action(&Event::Key(up)), None);
    }
}
