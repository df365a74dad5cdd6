//! Where those who should know the same disagree: the ledger, the book, the regions and kubelet.

use crate::book::Book;
use crate::checkpoint::Name;
use crate::identity::Holder;
use crate::node::grant_of;
use crate::plugin::Nonce;
use partage_core::model::{ContainerName, PodUid, Share};
use std::collections::{BTreeMap, BTreeSet};

/// A region, as far as it is compared.
pub(crate) struct Kept<'a> {
    pub(crate) nonce: &'a Nonce,
    pub(crate) uid: &'a PodUid,
    pub(crate) container: &'a ContainerName,
    pub(crate) shares: &'a [Share],
}

/// What cannot be right, each in a sentence. `held` is what kubelet gave to pods that are there; `on_disk` are all regions, also
/// those that nobody keeps.
pub(crate) fn mismatches<'a>(
    book: &Book,
    regions: impl IntoIterator<Item = Kept<'a>>,
    on_disk: &BTreeSet<Nonce>,
    held: &[Holder],
    names: &BTreeMap<Nonce, Name>,
) -> Vec<String> {
    let mut wrong: Vec<String> = book.audit().iter().map(ToString::to_string).collect();
    for Kept { nonce, uid, container, shares } in regions {
        let granted = book.record(uid).and_then(|record| grant_of(record, container));
        if granted.is_none_or(|grant| grant.shares != shares) {
            wrong.push(format!("the region of {nonce} is not what the book says of pod {uid}"));
        }
        let other = held.iter().find(|holder| holder.nonce.as_ref() == Some(nonce) && holder.uid != *uid);
        if let Some(other) = other {
            wrong.push(format!("kubelet gave {nonce} to pod {}, its region is of pod {uid}", other.uid));
        }
    }
    for holder in held.iter().filter(|holder| book.record(&holder.uid).is_none()) {
        if let Some(nonce) = holder.nonce.as_ref().filter(|nonce| on_disk.contains(nonce)) {
            wrong.push(format!("pod {} has the region {nonce}, and nobody knows what it holds", holder.uid));
        }
    }
    let unknown = held.iter().filter_map(|holder| holder.nonce.as_ref());
    let unknown = unknown.filter(|nonce| !names.contains_key(nonce));
    wrong.extend(unknown.map(|nonce| format!("kubelet has {nonce}, which is not known here")));
    wrong
}

/// What was not there before. What is no longer there is news when it comes again.
pub(crate) fn news(before: &mut BTreeSet<String>, now: Vec<String>) -> Vec<String> {
    let now: BTreeSet<String> = now.into_iter().collect();
    let new = now.difference(before).cloned().collect();
    *before = now;
    new
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::tests::record;
    use crate::resources::tests::node;

    #[test]
    fn agreement_is_silent_and_every_disagreement_is_told() {
        let holder = |uid: &str, nonce: &str| Holder {
            uid: uid.into(),
            container: "main".into(),
            resource: "partage.dev/gpu".into(),
            ids: ["slot-1"].map(|id| crate::plugin::DeviceId(id.into())).into(),
            nonce: Some(Nonce(nonce.into())),
            name: None,
        };
        let name = |nonce: &str| {
            let Holder { resource, ids, .. } = holder("", nonce);
            (Nonce(nonce.into()), Name { nonce: Nonce(nonce.into()), resource, ids, at: 1 })
        };
        let book = |memory: &[u64]| {
            let records = memory.iter().enumerate().map(|(at, &mib)| record(&format!("u-{at}"), mib << 20));
            Book::new(node(&[1000, 1000]), records.map(|record| (record.pod.uid.clone(), record)).collect())
        };
        let told = |memory: &[u64], region: u64, held: &[Holder], names: &[&str]| {
            let (nonce, uid, container) = (Nonce("a".into()), "u-0".into(), "main".into());
            let share = record("u-0", region << 20).grant.grants.remove(0).shares;
            let kept = Kept { nonce: &nonce, uid: &uid, container: &container, shares: &share };
            let names = names.iter().map(|nonce| name(nonce)).collect();
            mismatches(&book(memory), [kept], &[Nonce("a".into())].into(), held, &names)
        };
        let held = [holder("u-0", "a")];
        assert_eq!(told(&[400], 400, &held, &["a"]), [""; 0]);
        assert_eq!(
            told(&[400], 500, &held, &["a"]),
            ["the region of a is not what the book says of pod u-0"]
        );
        assert_eq!(
            told(&[], 400, &held, &["a"]),
            [
                "the region of a is not what the book says of pod u-0",
                "pod u-0 has the region a, and nobody knows what it holds"
            ]
        );
        // One that waits for room has a name, and no region yet.
        assert_eq!(told(&[400], 400, &[held[0].clone(), holder("u-8", "b")], &["a", "b"]), [""; 0]);
        assert_eq!(
            told(&[400], 400, &[holder("u-7", "a")], &["a"]),
            [
                "kubelet gave a to pod u-7, its region is of pod u-0",
                "pod u-7 has the region a, and nobody knows what it holds"
            ]
        );
        assert_eq!(told(&[400], 400, &held, &[]), ["kubelet has a, which is not known here"]);
        let over = told(&[400, 700], 400, &held, &["a"]);
        assert!(matches!(over.as_slice(), [one] if one.contains("GPU-1")), "{over:?}");
    }

    #[test]
    fn what_does_not_agree_is_told_once() {
        let mut told = BTreeSet::new();
        let mut news = |now: &[&str]| news(&mut told, now.iter().map(ToString::to_string).collect());
        assert_eq!(news(&["a", "b", "a"]), ["a", "b"]);
        assert_eq!(news(&["b", "c"]), ["c"]);
        assert_eq!(news(&["b", "c"]), [""; 0]);
        assert_eq!(news(&[]), [""; 0]);
        assert_eq!(news(&["b"]), ["b"], "it came again");
    }
}
