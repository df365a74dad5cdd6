//! Truncates tenant-supplied text before it is quoted in a message.

/// Maximum number of characters of tenant text in a message: the maximum length of a container name.
const MAX_QUOTED_CHARS: usize = 63;
/// Maximum number of characters of a field name: the maximum length of a qualified name in Kubernetes.
const MAX_FIELD_CHARS: usize = 317;
/// Maximum number of characters of a whole message.
const MAX_MESSAGE_CHARS: usize = 500;

/// Truncates a tenant's text for a message.
pub(crate) fn shorten(text: &str) -> String {
    truncate_at(text, MAX_QUOTED_CHARS)
}

/// Truncates the name of a resource, annotation or path. Valid names are never truncated.
pub(crate) fn shorten_field(text: &str) -> String {
    truncate_at(text, MAX_FIELD_CHARS)
}

/// Truncates a message, which may list any number of items.
pub(crate) fn shorten_message(text: &str) -> String {
    truncate_at(text, MAX_MESSAGE_CHARS)
}

fn truncate_at(text: &str, max_chars: usize) -> String {
    match text.char_indices().nth(max_chars) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_truncated_between_characters() {
        assert_eq!(shorten("é"), "é");
        assert_eq!(shorten(&"é".repeat(63)), "é".repeat(63));
        assert_eq!(shorten(&"é".repeat(64)), "é".repeat(63) + "…");
    }
}
