//! Tasks: a queue, one evaluation at a time, and what became of each.

use std::{
    collections::{BTreeMap, VecDeque},
    fs,
    io::Read,
    path::PathBuf,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::Serialize;
use tokio::sync::watch;

use crate::evaluate::{Lab, Order, Outcome, record};

/// Tasks that are remembered after their end.
const REMEMBERED: usize = 1000;

/// Where a task stands, as FlashInfer-Bench names it; `cancelled` is ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Status {
    Pending,
    Running,
    Completed,
    Failed,
    Cancelled,
}

impl Status {
    pub(crate) fn is_over(self) -> bool {
        !matches!(self, Self::Pending | Self::Running)
    }
}

/// A task.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    pub(crate) id: String,
    pub(crate) order: Order,
    /// What the client calls its solution.
    pub(crate) name: String,
    pub(crate) client: String,
    pub(crate) status: Status,
    pub(crate) outcome: Option<Outcome>,
    pub(crate) error: Option<String>,
    pub(crate) submitted_s: u64,
    cancelled: Arc<AtomicBool>,
}

#[derive(Default)]
struct Inner {
    tasks: BTreeMap<String, Task>,
    /// In the order they came, those that are over too.
    order: VecDeque<String>,
}

/// All tasks of a service.
pub(crate) struct Tasks {
    inner: Mutex<Inner>,
    /// Something is to be done.
    work: Condvar,
    /// Something has changed.
    changed: watch::Sender<u64>,
    out: PathBuf,
    queue_max: usize,
    per_client_max: usize,
}

/// Why a task was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Full(pub(crate) String);

impl Tasks {
    /// An empty queue, and the thread that works on it.
    pub(crate) fn start(lab: Lab, out: PathBuf, queue_max: usize, per_client_max: usize) -> Arc<Self> {
        let (inner, work, changed) = (Mutex::default(), Condvar::new(), watch::Sender::new(0));
        let tasks = Arc::new(Self { inner, work, changed, out, queue_max, per_client_max });
        let own = Arc::clone(&tasks);
        // One at a time: what is measured must not be disturbed by the next.
        thread::spawn(move || own.work(&lab));
        tasks
    }

    /// Takes a task in.
    pub(crate) fn submit(&self, order: Order, name: String, client: &str) -> Result<Task, Full> {
        let mut inner = self.lock();
        let open = |task: &&Task| !task.status.is_over();
        let waiting = inner.tasks.values().filter(open).count();
        if waiting >= self.queue_max {
            return Err(Full(format!("{waiting} tasks are waiting, which is as many as may")));
        }
        let own = inner.tasks.values().filter(open).filter(|task| task.client == client).count();
        if own >= self.per_client_max {
            return Err(Full(format!(
                "this client has {own} tasks waiting or running, which is as many as one may"
            )));
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let task = Task {
            id: new_id(),
            order,
            name,
            client: client.to_owned(),
            status: Status::Pending,
            outcome: None,
            error: None,
            submitted_s: now.as_secs(),
            cancelled: Arc::default(),
        };
        inner.tasks.insert(task.id.clone(), task.clone());
        inner.order.push_back(task.id.clone());
        let over =
            inner.order.iter().position(|id| inner.tasks.get(id).is_none_or(|task| task.status.is_over()));
        if inner.order.len() > REMEMBERED
            && let Some(oldest) = over.and_then(|at| inner.order.remove(at))
        {
            inner.tasks.remove(&oldest);
        }
        self.work.notify_one();
        Ok(task)
    }

    /// A task.
    pub(crate) fn find(&self, id: &str) -> Option<Task> {
        self.lock().tasks.get(id).cloned()
    }

    /// All tasks of a client, the newest first.
    pub(crate) fn of(&self, client: &str) -> Vec<Task> {
        let inner = self.lock();
        let own = inner.order.iter().rev().filter_map(|id| inner.tasks.get(id));
        own.filter(|task| task.client == client).cloned().collect()
    }

    /// Tasks that wait or run.
    pub(crate) fn waiting(&self) -> usize {
        self.lock().tasks.values().filter(|task| !task.status.is_over()).count()
    }

    /// Ends a task, whether it runs or not; one that is over stays as it is.
    pub(crate) fn cancel(&self, id: &str) {
        let mut inner = self.lock();
        let Some(task) = inner.tasks.get_mut(id).filter(|task| !task.status.is_over()) else { return };
        task.cancelled.store(true, Ordering::Relaxed);
        task.status = Status::Cancelled;
        drop(inner);
        self.tell();
    }

    /// Waits until these tasks are over, or for so long.
    pub(crate) async fn wait(&self, ids: &[String], limit: Duration) {
        let mut changes = self.changed.subscribe();
        let all_over = || ids.iter().all(|id| self.find(id).is_none_or(|task| task.status.is_over()));
        let over = async {
            while !all_over() {
                // The sender lives as long as this.
                if changes.changed().await.is_err() {
                    break;
                }
            }
        };
        let _ = tokio::time::timeout(limit, over).await;
    }

    fn work(&self, lab: &Lab) {
        loop {
            let task = self.next();
            let folder = self.out.join(&task.id);
            let name = format!("{}_t{}", task.order.kernel, &task.id[..8]);
            let done = lab.evaluate(&task.order, &name, &folder, &task.cancelled);
            let mut inner = self.lock();
            let Some(known) = inner.tasks.get_mut(&task.id).filter(|known| !known.status.is_over()) else {
                continue;
            };
            match done {
                Ok(outcome) => {
                    known.status = Status::Completed;
                    known.outcome = Some(outcome);
                }
                Err(error) => {
                    known.status = Status::Failed;
                    known.error = Some(format!("{error:#}"));
                }
            }
            let mut record = record::of(&known.id, &known.order, known.outcome.as_ref());
            record["name"] = known.name.clone().into();
            record["submitted_s"] = known.submitted_s.into();
            record["error"] = known.error.clone().into();
            drop(inner);
            // The answer does not depend on it.
            let _ = record::write(&folder, &record);
            self.tell();
        }
    }

    /// The next task to run, which it then does.
    fn next(&self) -> Task {
        let mut inner = self.lock();
        loop {
            let Inner { tasks, order } = &mut *inner;
            let is_next = |id: &&String| tasks.get(*id).is_some_and(|task| task.status == Status::Pending);
            let next = order.iter().find(is_next).cloned();
            if let Some(task) = next.and_then(|id| tasks.get_mut(&id)) {
                task.status = Status::Running;
                return task.clone();
            }
            inner = self.work.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn tell(&self) {
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Nothing panics while this is held, so what is in it is whole.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A random name that cannot be guessed.
fn new_id() -> String {
    let mut bytes = [0_u8; 16];
    let read = fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    if read.is_err() {
        // Without a source of chance ids are at least distinct.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        bytes = now.as_nanos().to_be_bytes();
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
