//! Attributes the processes of the machine to many shares at once: each process is inspected once, however many shares
//! there are.

use super::{Membership, file_id, root_of};
use crate::process::ProcessIdentity;
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The device and inode numbers of a file.
type FileIdentity = (u64, u64);

/// The memberships of many shares, indexed for lookup by process. Shares are identified by their index in the list.
#[derive(Debug, Default)]
pub struct ProcessIndex {
    /// The pids in cgroups, as of the creation of the index.
    listed: HashMap<u32, Vec<usize>>,
    namespaces: HashMap<FileIdentity, Vec<usize>>,
    /// Files by the path at which they are seen. Shares see different files at the same path.
    regions: HashMap<PathBuf, HashMap<FileIdentity, Vec<usize>>>,
    /// Environment variables as `NAME=value`.
    variables: HashMap<Vec<u8>, Vec<usize>>,
}

/// Returns the running processes of each share, in the order of the shares, as [`super::find_members`] does, with a
/// single pass over the processes of the machine.
pub fn members_of_shares(shares: &[Vec<Membership>]) -> io::Result<Vec<Vec<ProcessIdentity>>> {
    let mut found = pass(shares)?;
    let missed = |at: &usize| found[*at].is_empty() && !shares[*at].is_empty();
    let missed: Vec<usize> = (0..shares.len()).filter(missed).collect();
    if !missed.is_empty() {
        // A process may fork and end while the list is read, its child being before the place that was read.
        let memberships: Vec<Vec<Membership>> = missed.iter().map(|at| shares[*at].clone()).collect();
        for (at, members) in missed.into_iter().zip(pass(&memberships)?) {
            found[at] = members;
        }
    }
    Ok(found.into_iter().map(|members| members.into_iter().collect()).collect())
}

fn pass(shares: &[Vec<Membership>]) -> io::Result<Vec<BTreeSet<ProcessIdentity>>> {
    let index = ProcessIndex::of(shares)?;
    let mut found = vec![BTreeSet::new(); shares.len()];
    for (pid, listed) in &index.listed {
        if let Some(identity) = ProcessIdentity::of_running(*pid) {
            listed.iter().for_each(|share| _ = found[*share].insert(identity));
        }
    }
    if !index.requires_inspection() {
        return Ok(found);
    }
    for pid in super::pids()? {
        // Most processes belong to no share, and reading the identity costs more than this check.
        if index.inspect(pid).is_empty() {
            continue;
        }
        // The identity is read before the membership is checked again: the pid may be reused meanwhile.
        let Some(identity) = ProcessIdentity::of_running(pid) else { continue };
        let shares = index.inspect(pid);
        if !shares.is_empty() && identity.is_running() {
            shares.into_iter().for_each(|share| _ = found[share].insert(identity));
        }
    }
    Ok(found)
}

impl ProcessIndex {
    /// Creates an index of the memberships of each share. Cgroups are read now.
    pub fn of(shares: &[Vec<Membership>]) -> io::Result<Self> {
        let mut index = Self::default();
        for (share, membership) in
            shares.iter().enumerate().flat_map(|(at, memberships)| memberships.iter().map(move |m| (at, m)))
        {
            match membership {
                Membership::Cgroup(cgroup) => {
                    cgroup.pids()?.into_iter().for_each(|pid| put(&mut index.listed, pid, share));
                }
                Membership::MountNamespace { device, inode } => {
                    put(&mut index.namespaces, (*device, *inode), share);
                }
                Membership::Region { at, device, inode } => {
                    put(index.regions.entry(at.clone()).or_default(), (*device, *inode), share);
                }
                Membership::Variable { name, value } => {
                    put(&mut index.variables, format!("{name}={value}").into_bytes(), share);
                }
            }
        }
        Ok(index)
    }

    /// Returns the first share that a process belongs to; `None` if the process cannot be inspected.
    pub fn owner(&self, pid: u32) -> Option<usize> {
        let listed = self.listed.get(&pid).into_iter().flatten().copied();
        listed.min().or_else(|| self.inspect(pid).first().copied())
    }

    /// Returns whether any share has a membership that requires inspecting each process.
    fn requires_inspection(&self) -> bool {
        !(self.namespaces.is_empty() && self.regions.is_empty() && self.variables.is_empty())
    }

    fn inspect(&self, pid: u32) -> BTreeSet<usize> {
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
