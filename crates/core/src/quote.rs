//! Tenants' text in messages: never at length.

/// The most characters of a tenant's text that a message repeats: no container's name is longer.
const MOST_QUOTED: usize = 63;
/// The longest name a resource, annotation or path can have in Kubernetes.
const MOST_NAMED: usize = 317;
/// The longest message.
const MOST_SAID: usize = 500;

/// A tenant's text, cut to what a person reads of it.
pub(crate) fn short(text: &str) -> String {
    cut(text, MOST_QUOTED)
}

/// The name of a field, which is only cut where no name is that long.
pub(crate) fn field(text: &str) -> String {
    cut(text, MOST_NAMED)
}

/// A message, which may list any number of things.
pub(crate) fn message(text: &str) -> String {
    cut(text, MOST_SAID)
}

fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_between_characters() {
        assert_eq!(short("é"), "é");
        assert_eq!(short(&"é".repeat(63)), "é".repeat(63));
        assert_eq!(short(&"é".repeat(64)), "é".repeat(63) + "…");
    }
}
