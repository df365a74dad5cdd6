//! Whose the machine's processes are, for many shares at once: each process is looked at once, however many shares
//! there are.

use super::{Mark, file_id, root_of};
use crate::process::Identity;
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A file's device and number.
type FileId = (u64, u64);

/// What tells the members of many shares, each known by its place in the list.
#[derive(Debug, Default)]
pub struct Census {
    /// What cgroups list, as it was when this was made.
    listed: HashMap<u32, Vec<usize>>,
    namespaces: HashMap<FileId, Vec<usize>>,
    /// By where it is seen. Shares differ in what they see at the same place.
    regions: HashMap<PathBuf, HashMap<FileId, Vec<usize>>>,
    /// By the whole setting, `NAME=value`.
    variables: HashMap<Vec<u8>, Vec<usize>>,
}

/// All living processes of each share, in the order of the shares: as [`super::members`] finds them, with one pass over
/// the machine's processes for all.
pub fn census(shares: &[Vec<Mark>]) -> io::Result<Vec<Vec<Identity>>> {
    let mut found = pass(shares)?;
    let missed = |at: &usize| found[*at].is_empty() && !shares[*at].is_empty();
    let missed: Vec<usize> = (0..shares.len()).filter(missed).collect();
    if !missed.is_empty() {
        // A process may fork and end while the list is read, its child being before the place that was read.
        let marks: Vec<Vec<Mark>> = missed.iter().map(|at| shares[*at].clone()).collect();
        for (at, members) in missed.into_iter().zip(pass(&marks)?) {
            found[at] = members;
        }
    }
    Ok(found.into_iter().map(|members| members.into_iter().collect()).collect())
}

fn pass(shares: &[Vec<Mark>]) -> io::Result<Vec<BTreeSet<Identity>>> {
    let census = Census::of(shares)?;
    let mut found = vec![BTreeSet::new(); shares.len()];
    for (pid, listed) in &census.listed {
        if let Some(identity) = Identity::living(*pid) {
            listed.iter().for_each(|share| _ = found[*share].insert(identity));
        }
    }
    if !census.looks() {
        return Ok(found);
    }
    for pid in super::pids()? {
        // Most are nobody's, and to know who each is costs more than to see that.
        if census.looked_at(pid).is_empty() {
            continue;
        }
        // Who it is comes before what it has: the number may pass to another process meanwhile.
        let Some(identity) = Identity::living(pid) else { continue };
        let shares = census.looked_at(pid);
        if !shares.is_empty() && identity.lives() {
            shares.into_iter().for_each(|share| _ = found[share].insert(identity));
        }
    }
    Ok(found)
}

impl Census {
    /// Of the marks of each share. Cgroups are read now.
    pub fn of(shares: &[Vec<Mark>]) -> io::Result<Self> {
        let mut census = Self::default();
        for (share, mark) in
            shares.iter().enumerate().flat_map(|(at, marks)| marks.iter().map(move |m| (at, m)))
        {
            match mark {
                Mark::Cgroup(cgroup) => {
                    cgroup.pids()?.into_iter().for_each(|pid| put(&mut census.listed, pid, share));
                }
                Mark::MountNamespace { device, inode } => {
                    put(&mut census.namespaces, (*device, *inode), share);
                }
                Mark::Region { at, device, inode } => {
                    put(census.regions.entry(at.clone()).or_default(), (*device, *inode), share);
                }
                Mark::Variable { name, value } => {
                    put(&mut census.variables, format!("{name}={value}").into_bytes(), share);
                }
            }
        }
        Ok(census)
    }

    /// The first share that a process belongs to; none if that cannot be seen.
    pub fn owner(&self, pid: u32) -> Option<usize> {
        let listed = self.listed.get(&pid).into_iter().flatten().copied();
        listed.min().or_else(|| self.looked_at(pid).first().copied())
    }

    /// Whether any share has a mark that only a look at each process finds.
    fn looks(&self) -> bool {
        !(self.namespaces.is_empty() && self.regions.is_empty() && self.variables.is_empty())
    }

    fn looked_at(&self, pid: u32) -> BTreeSet<usize> {
        let mut shares = BTreeSet::new();
        let mut add = |found: Option<&Vec<usize>>| shares.extend(found.into_iter().flatten());
        if !self.namespaces.is_empty()
            && let Ok(id) = file_id(Path::new(&format!("/proc/{pid}/ns/mnt")))
        {
            add(self.namespaces.get(&id));
        }
        for (at, seen) in &self.regions {
            if let Ok(id) = file_id(&root_of(pid, at)) {
                add(seen.get(&id));
            }
        }
        if !self.variables.is_empty()
            && let Ok(all) = fs::read(format!("/proc/{pid}/environ"))
        {
            all.split(|byte| *byte == 0).for_each(|one| add(self.variables.get(one)));
        }
        shares
    }
}

fn put<K: std::hash::Hash + Eq>(map: &mut HashMap<K, Vec<usize>>, key: K, share: usize) {
    map.entry(key).or_default().push(share);
}
