//! The descendants of a process: its children, those of another session, and those whose parents are gone.

use std::{
    collections::BTreeSet,
    fs,
    sync::atomic::{AtomicBool, Ordering},
};

/// Whether orphans come to this process, and are nobody else's.
static ADOPTS: AtomicBool = AtomicBool::new(false);

/// From now on what a program leaves behind becomes this process's child, and is found there. For a program of its own only: in
/// somebody else's process there are children that are none of our business.
pub fn adopt_orphans() {
    #[cfg(target_os = "linux")]
    {
        unsafe extern "C" {
            fn prctl(option: i32, value: u64, _: u64, _: u64, _: u64) -> i32;
        }
        const PR_SET_CHILD_SUBREAPER: i32 = 36;
        // SAFETY: this option takes one number and changes nothing but who adopts orphans.
        let set = unsafe { prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) } == 0;
        ADOPTS.store(set, Ordering::Relaxed);
    }
}

struct Process {
    pid: u32,
    parent: u32,
    group: u32,
    session: u32,
}

/// What a program has started and is not in its group: its descendants, what carries its mark in the environment, and, where
/// asked for, orphans of another session that this process has adopted. Where there is no `/proc`, nothing.
pub(super) fn strays(leader: u32, mark: &str, with_orphans: bool) -> Vec<u32> {
    let all = processes();
    let own = std::process::id();
    let own_session = all.iter().find(|process| process.pid == own).map(|process| process.session);
    let adopts = with_orphans && ADOPTS.load(Ordering::Relaxed);
    let is_adopted =
        |process: &Process| adopts && process.parent == own && Some(process.session) != own_session;
    let roots = all.iter().filter(|process| is_adopted(process) || is_marked(process.pid, mark));
    let mut family: BTreeSet<u32> = roots.map(|process| process.pid).chain([leader]).collect();
    loop {
        let before = family.len();
        let children =
            all.iter().filter(|process| family.contains(&process.parent)).map(|process| process.pid);
        let children: Vec<u32> = children.collect();
        family.extend(children);
        if family.len() == before {
            break;
        }
    }
    let in_the_group = |pid: &u32| all.iter().any(|process| process.pid == *pid && process.group == leader);
    family.retain(|pid| !in_the_group(pid) && *pid != leader && *pid != own);
    family.into_iter().collect()
}

fn processes() -> Vec<Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter_map(|pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name before may hold anything. After it: state, parent, group, session.
        let mut fields = stat.rsplit(") ").next()?.split(' ');
        let is_gone = fields.next()? == "Z";
        let mut number = || fields.next()?.parse().ok();
        let (parent, group, session) = (number()?, number()?, number()?);
        (!is_gone).then_some(Process { pid, parent, group, session })
    })
    .collect()
}

fn is_marked(pid: u32, mark: &str) -> bool {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
}
