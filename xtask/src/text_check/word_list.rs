//! The phrases that the checks of words and sentences look for. The strings of this file are exempt.

/// Words and phrases that have a standard term, with the term.
pub(super) const WORD_LIST: [(&str, &str); 46] = [
    ("nobody", "name the component"),
    ("nobody's", "orphaned, unowned"),
    ("somebody", "name the component"),
    ("somebody's", "name the component"),
    ("anybody", "name the component"),
    ("everybody", "all users, every process"),
    ("whoever", "name the component"),
    ("whomever", "name the component"),
    ("whatsoever", "any"),
    ("anew", "again"),
    ("likewise", "say what applies"),
    ("is let be", "is not changed"),
    ("are let be", "are not changed"),
    ("not to be had", "unavailable"),
    ("to be had", "available"),
    ("bond", "confinement"),
    ("promised", "guaranteed, granted"),
    ("ill", "unhealthy"),
    ("gets well", "recovers"),
    ("is well again", "has recovered"),
    ("told of", "reported"),
    ("tells of", "reports"),
    ("tell of", "report"),
    ("makes place", "frees capacity"),
    ("is asked for it", "name the request"),
    ("what there is", "what is available"),
    ("there is nobody", "name the component"),
    ("is no text", "is not valid UTF-8"),
    ("that was no", "malformed"),
    ("as it stands", "unchanged"),
    ("tell more", "debug logging"),
    ("of its own accord", "automatically"),
    ("the program's promise", "state the precondition"),
    ("the caller's promise", "state the precondition"),
    ("keeper", "daemon"),
    ("undertaker", "name the component"),
    ("wishes", "requests"),
    ("the books", "ledger"),
    ("kindly", "omit it"),
    ("a stranger", "an unknown process"),
    ("strangers", "unknown processes"),
    ("well-behaved word", "omit it"),
    ("thrice", "three times"),
    ("hitherto", "so far"),
    ("whence", "from where"),
    ("henceforth", "from now on"),
];

/// Pronouns that must not be the subject at the start of a sentence, as in "Who cuts its file short is refused".
pub(super) const RELATIVE_SUBJECTS: [&str; 4] = ["who", "whose", "whom", "of which"];
/// "What" followed by one of these starts a sentence whose subject is hidden: "What is held is released".
pub(super) const WHAT_VERBS: [&str; 12] =
    ["is", "are", "was", "were", "has", "have", "had", "does", "did", "can", "may", "cannot"];
/// First lines that only point elsewhere.
pub(super) const EMPTY_SENTENCES: [&str; 6] =
    ["the same.", "the same", "which.", "where.", "why.", "likewise."];
