//! A Slurm of the test's own: a controller and two nodes on this machine, in a temporary folder.

use std::{
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

pub(crate) struct Cluster {
    folder: tempfile::TempDir,
}

const PACKAGES: [&str; 4] = ["slurmctld", "slurmd", "slurm-client", "munge"];

impl Cluster {
    /// Starts it, or says why that cannot be done here. In CI what is missing is installed.
    pub(crate) fn start() -> Result<Self, String> {
        if !is_root() {
            return Err("only root can start the daemons of a Slurm".to_owned());
        }
        if !["slurmctld", "slurmd", "srun", "munged"].iter().all(|program| is_there(program)) {
            install()?;
        }
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let cluster = Self { folder };
        cluster.configure().map_err(|error| error.to_string())?;
        let path = |name: &str| cluster.path(name).display().to_string();
        run(Command::new("munged").args([
            "--force",
            &format!("--key-file={}", path("munge/key")),
            &format!("--socket={}", path("munge.socket")),
            &format!("--pid-file={}", path("munged.pid")),
            &format!("--log-file={}", path("munge/log")),
            &format!("--seed-file={}", path("munge/seed")),
        ]))?;
        run(cluster.command("slurmctld").args(["-f", &path("slurm.conf")]))?;
        for node in ["n1", "n2"] {
            run(cluster.command("slurmd").args(["-f", &path("slurm.conf"), "-N", node]))?;
        }
        cluster.wait_until_it_works()?;
        Ok(cluster)
    }

    pub(crate) fn configuration(&self) -> PathBuf {
        self.path("slurm.conf")
    }

    /// Kills a node with all that runs on it, as a power failure does.
    pub(crate) fn kill_node(&self, node: &str) {
        let spool = self.path(&format!("spool-{node}")).display().to_string();
        let daemon = self.pid(&format!("slurmd-{node}.pid"));
        let mut doomed: Vec<u32> = daemon.into_iter().collect();
        for pid in pids() {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let environment = String::from_utf8_lossy(&environment).into_owned();
            let ours = environment.contains(&format!("SLURM_CONF={}", self.configuration().display()));
            let there =
                environment.split('\0').any(|variable| *variable == *format!("SLURMD_NODENAME={node}"));
            if (ours && there) || command_line(pid).contains(&spool) {
                doomed.push(pid);
            }
        }
        // The daemons of the steps: parents of what runs there, and no other processes of ours.
        let steps: Vec<u32> = doomed
            .iter()
            .filter_map(|pid| parent(*pid))
            .filter(|pid| command_line(*pid).starts_with("slurmstepd"))
            .collect();
        kill(doomed.into_iter().chain(steps));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("SLURM_CONF", self.configuration());
        command
    }

    fn pid(&self, file: &str) -> Option<u32> {
        fs::read_to_string(self.path(file)).ok()?.trim().parse().ok()
    }

    fn configure(&self) -> std::io::Result<()> {
        let folder = self.folder.path();
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
        for name in ["munge", "state"] {
            fs::create_dir(folder.join(name))?;
            fs::set_permissions(folder.join(name), fs::Permissions::from_mode(0o700))?;
        }
        let mut key = vec![0; 1024];
        std::io::Read::read_exact(&mut fs::File::open("/dev/urandom")?, &mut key)?;
        fs::write(folder.join("munge/key"), key)?;
        fs::set_permissions(folder.join("munge/key"), fs::Permissions::from_mode(0o400))?;
        let host = fs::read_to_string("/proc/sys/kernel/hostname")?;
        let host = host.trim().split('.').next().unwrap_or_default().to_owned();
        let [controller, first, second] = free_ports()?;
        let d = folder.display();
        // CR_LLN: jobs are spread over the nodes, not packed onto the first.
        let text = format!(
            "ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthInfo=socket={d}/munge.socket
StateSaveLocation={d}/state
SlurmdSpoolDir={d}/spool-%n
SlurmctldPidFile={d}/slurmctld.pid
SlurmdPidFile={d}/slurmd-%n.pid
SlurmctldLogFile={d}/slurmctld.log
SlurmdLogFile={d}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU,CR_LLN
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"
        );
        fs::write(folder.join("slurm.conf"), text)
    }

    fn wait_until_it_works(&self) -> Result<(), String> {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let states = self.command("sinfo").args(["-h", "-o", "%D %t"]).output();
            let states = states.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
            if states.as_ref().is_ok_and(|states| states.trim() == "2 idle") {
                return Ok(());
            }
            if Instant::now() > deadline {
                let log = fs::read_to_string(self.path("slurmctld.log")).unwrap_or_default();
                let last: Vec<&str> = log.lines().rev().take(5).collect();
                return Err(format!("Slurm does not come up here: sinfo says {states:?}, its log {last:?}"));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.kill_node("n1");
        self.kill_node("n2");
        kill(["slurmctld.pid", "munged.pid"].into_iter().filter_map(|file| self.pid(file)));
        // They write into the folder until they are gone.
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn is_root() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.starts_with("Uid:") && line.split_whitespace().nth(2) == Some("0"))
}

fn is_there(program: &str) -> bool {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders).any(|folder| folder.join(program).is_file())
}

/// Only where CI says that a test may change the machine.
fn install() -> Result<(), String> {
    if std::env::var_os("CI").is_none() {
        return Err(format!("there is no Slurm here; `apt-get install {}` installs one", PACKAGES.join(" ")));
    }
    if !is_there("apt-get") {
        return Err("there is no Slurm and no apt-get here".to_owned());
    }
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("timeout");
        command.args(["180", "apt-get"]).args(arguments).env("DEBIAN_FRONTEND", "noninteractive");
        run(&mut command)
    };
    let wanted = [&["install", "-y", "--no-install-recommends"][..], &PACKAGES].concat();
    apt(&wanted).or_else(|_| apt(&["update"]).and_then(|()| apt(&wanted)))
}

fn run(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    // A daemon that keeps a pipe open would be waited for.
    let output = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    match output {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{name} ends with {status}")),
        Err(error) => Err(format!("{name}: {error}")),
    }
}

fn free_ports() -> std::io::Result<[u16; 3]> {
    let listeners = [
        TcpListener::bind("127.0.0.1:0")?,
        TcpListener::bind("127.0.0.1:0")?,
        TcpListener::bind("127.0.0.1:0")?,
    ];
    let mut ports = [0; 3];
    for (port, listener) in ports.iter_mut().zip(&listeners) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}

fn pids() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn command_line(pid: u32) -> String {
    let bytes = fs::read(Path::new("/proc").join(pid.to_string()).join("cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.split(' ').nth(1)?.parse().ok()
}

fn kill(pids: impl Iterator<Item = u32>) {
    for pid in pids {
        let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).stderr(Stdio::null()).status();
    }
}
