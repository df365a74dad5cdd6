//! Finds phrases of the word list, and sentences that break a rule.

use super::word_list::{EMPTY_SENTENCES, RELATIVE_SUBJECTS, WHAT_VERBS, WORD_LIST};

/// A finding in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Offense {
    /// Line number, from 1.
    pub(super) line: usize,
    /// The rule and the words that break it.
    pub(super) what: String,
}

impl Offense {
    /// Moves an offense of a part of a file that starts at `line` to its place in the file.
    pub(super) fn below(self, line: usize) -> Offense {
        Offense { line: self.line + line - 1, ..self }
    }
}

/// Finds phrases of the word list.
pub(super) fn check_words(text: &str) -> Vec<Offense> {
    let mut offenses = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let lower = line.to_lowercase();
        for (phrase, instead) in WORD_LIST {
            if contains_phrase(&lower, phrase) {
                offenses.push(Offense { line: number + 1, what: format!("{phrase:?}: {instead}") });
            }
        }
    }
    offenses
}

/// Finds sentences that start with a relative pronoun as their subject, or that say nothing.
pub(super) fn check_sentences(text: &str) -> Vec<Offense> {
    let mut offenses = Vec::new();
    for (line, sentence) in sentences(text) {
        let lower = sentence.to_lowercase();
        let words: Vec<&str> = lower.split_whitespace().take(2).collect();
        let is_question = lower.trim_end_matches(['*', '_', ')', '"']).ends_with('?');
        let is_relative = RELATIVE_SUBJECTS.iter().any(|subject| contains_phrase_at_start(&lower, subject))
            || matches!(words[..], ["what", verb] if WHAT_VERBS.contains(&verb));
        if (is_relative && !is_question) || EMPTY_SENTENCES.contains(&lower.as_str()) {
            let start: String = sentence.chars().take(50).collect();
            offenses.push(Offense { line, what: format!("sentence without a named subject: {start:?}") });
        }
    }
    offenses
}

/// Checks Markdown outside code blocks: the word list, and the sentences of its paragraphs.
pub(super) fn check_markdown(text: &str) -> Vec<Offense> {
    let mut prose = String::with_capacity(text.len());
    let mut in_code = false;
    for line in text.lines() {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        // Headings and table rows are fragments by nature; they are checked for words only.
        if !in_code && !is_fence {
            prose.push_str(line);
        }
        prose.push('\n');
    }
    let mut offenses = check_words(&prose);
    let paragraphs: String = prose
        .lines()
        .map(|line| if line.starts_with(['#', '|']) { "\n" } else { line })
        .collect::<Vec<_>>()
        .join("\n");
    offenses.extend(check_sentences(&paragraphs));
    offenses
}

/// Splits a text into sentences with the number of the line in which each starts. A blank line ends a sentence.
fn sentences(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut sentence = String::new();
    let mut start = 1;
    for (number, line) in text.lines().enumerate() {
        let line = line.trim().trim_start_matches(['-', '*', '>', ' ', '|']);
        if line.is_empty() && !sentence.is_empty() {
            found.push((start, std::mem::take(&mut sentence)));
        }
        for word in line.split_whitespace() {
            if sentence.is_empty() {
                start = number + 1;
            } else {
                sentence.push(' ');
            }
            sentence.push_str(word);
            if word.ends_with(['.', '?', '!', ':']) {
                found.push((start, std::mem::take(&mut sentence)));
            }
        }
    }
    if !sentence.is_empty() {
        found.push((start, sentence));
    }
    found
}

/// Whether `text` (lower case) contains a phrase as whole words.
fn contains_phrase(text: &str, phrase: &str) -> bool {
    let is_word =
        |letter: Option<char>| letter.is_some_and(|letter| letter.is_alphanumeric() || letter == '_');
    text.match_indices(phrase).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + phrase.len()..]);
        let continues = after.strip_prefix('\'').is_some_and(|rest| is_word(rest.chars().next()));
        !is_word(before.chars().next_back()) && !is_word(after.chars().next()) && !continues
    })
}

fn contains_phrase_at_start(text: &str, phrase: &str) -> bool {
    text.strip_prefix(phrase).is_some_and(|rest| rest.starts_with(' '))
}
