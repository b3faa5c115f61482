//! Names as messages show them. A file's name may hold anything but a slash and a NUL: what would begin a new line, move
//! a terminal's cursor or turn the direction of reading is escaped. Pure.

use std::fmt::{self, Write as _};
use std::path::Path;

/// A name, with an escape in place of every character that is not seen but obeyed.
#[derive(Debug, Clone, Copy)]
pub struct Shown<'a>(pub &'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            if is_obeyed(character) {
                write!(f, "{}", character.escape_default())?;
            } else {
                f.write_char(character)?;
            }
        }
        Ok(())
    }
}

/// Control characters, line and paragraph separators, and what changes the direction of the text.
fn is_obeyed(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// [`Shown`] for a path; what is no valid text is replaced.
#[must_use]
pub fn shown(path: &Path) -> String {
    Shown(&path.to_string_lossy()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_obeys_is_escaped_and_all_else_is_shown() {
        for plain in ["engine0_dp0", "a b", "%s{}", "\u{e9}\u{65e5}", "a\\b", "'\"`"] {
            assert_eq!(Shown(plain).to_string(), plain);
        }
        for (name, expected) in [
            ("a\nb", "a\\nb"),
            ("a\rb\t", "a\\rb\\t"),
            ("\u{1b}[2J", "\\u{1b}[2J"),
            ("\u{7f}\u{9b}31m", "\\u{7f}\\u{9b}31m"),
            ("\u{202e}gpj.exe", "\\u{202e}gpj.exe"),
            ("a\u{2028}b", "a\\u{2028}b"),
        ] {
            assert_eq!(shown(Path::new(name)), expected);
        }
    }
}
