//! The contract as a model in memory: what is under each key and name, what each session's open transaction has done, and what
//! every call must therefore answer. It knows no tables: when a purge has run, it is told what is gone, and says whether
//! that could go.

use std::collections::{BTreeMap, BTreeSet};

/// Microseconds since 2000, as PostgreSQL counts.
pub type Moment = i64;
pub type Micros = i64;

/// What a call answers: its columns as text, or an SQLSTATE.
pub type Answer = Result<Vec<Option<String>>, String>;

pub fn text(value: impl ToString) -> Option<String> {
    Some(value.to_string())
}

fn error(sqlstate: &str) -> Answer {
    Err(sqlstate.to_string())
}

const LOST: &str = "ID003";
const BAD: &str = "22023";
/// It would wait for another transaction, and gives up at once.
const WAITS: &str = "55P03";

/// What is stored under a key.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    pub token: String,
    pub created_at: Moment,
    /// End of the lease, or of the ttl.
    pub ends_at: Moment,
    pub attempt: i32,
    pub owner: Option<String>,
    pub fingerprint: Option<String>,
    pub state: State,
}

#[derive(Clone, Debug, PartialEq)]
pub enum State {
    Claimed { lease: Micros, checkpoint: Option<String> },
    Completed { at: Moment, result: Option<String>, body: Option<String> },
}

impl Record {
    fn is_completed(&self) -> bool {
        matches!(self.state, State::Completed { .. })
    }

    /// A completed record past its ttl is as good as none.
    fn counts(&self, now: Moment) -> bool {
        !self.is_completed() || now < self.ends_at
    }

    fn checkpoint(&self) -> Option<String> {
        match &self.state {
            State::Claimed { checkpoint, .. } => checkpoint.clone(),
            State::Completed { .. } => None,
        }
    }

    /// Whether a purge may remove it: an expired record, a claim abandoned for `ttl`.
    pub fn may_go(&self, now: Moment, ttl: Micros) -> bool {
        self.ends_at <= if self.is_completed() { now } else { now - ttl }
    }
}

/// What is stored of a lock.
#[derive(Clone, Debug, PartialEq)]
pub struct Lease {
    pub token: Option<String>,
    pub fence: i64,
    pub ends_at: Moment,
    pub ttl: Micros,
    pub holder: Option<String>,
}

impl Lease {
    fn is_running(&self, now: Moment) -> bool {
        self.token.is_some() && now < self.ends_at
    }

    pub fn may_go(&self, now: Moment, ttl: Micros) -> bool {
        self.ends_at <= now - ttl
    }
}

/// A claim that a transaction made, and how it ended there.
#[derive(Clone)]
struct Held {
    record: Record,
    lease: Option<Micros>,
    end: Option<End>,
}

#[derive(Clone, Copy, PartialEq)]
enum End {
    Completed,
    Released,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Kind {
    Key,
    Name,
}

/// How a transaction has locked a key or name; any but two guards exclude each other, and a guard and an extension.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mode {
    Guards,
    Extends,
    Owns,
}

/// What a transaction has done so far, or had at a savepoint.
#[derive(Clone, Default)]
struct Work {
    records: BTreeMap<usize, Option<Record>>,
    leases: BTreeMap<usize, Lease>,
    held: BTreeMap<usize, Held>,
    locks: BTreeSet<(Kind, usize, Mode)>,
}

#[derive(Clone, Default)]
struct Transaction {
    work: Work,
    savepoints: Vec<Work>,
    failed: bool,
}

pub struct Contract {
    pub now: Moment,
    pub ttl: Micros,
    pub lock_ttl: Micros,
    pub records: BTreeMap<usize, Record>,
    pub leases: BTreeMap<usize, Lease>,
    /// The last committed fence of each name, also of those whose row is gone.
    fences: BTreeMap<usize, i64>,
    sessions: Vec<Option<Transaction>>,
}

/// What a caller of `idem_begin` brings.
pub struct Request<'a> {
    pub fingerprint: Option<&'a str>,
    pub owner: Option<&'a str>,
    pub lease: Option<Micros>,
    pub takeover: bool,
}

/// What the server gave, which no model can know beforehand.
#[derive(Default)]
pub struct Given {
    pub token: String,
    pub fence: i64,
}

fn differ(stored: Option<&str>, given: Option<&str>) -> bool {
    matches!((stored, given), (Some(stored), Some(given)) if stored != given)
}

impl Contract {
    pub fn new(sessions: usize, lock_ttl: Micros) -> Contract {
        Contract {
            now: 0,
            ttl: 0,
            lock_ttl,
            records: BTreeMap::new(),
            leases: BTreeMap::new(),
            fences: BTreeMap::new(),
            sessions: vec![None; sessions],
        }
    }

    // ------------------------------------------------------------ transactions

    pub fn in_transaction(&self, session: usize) -> bool {
        self.sessions[session].is_some()
    }

    pub fn failed(&self, session: usize) -> bool {
        self.sessions[session].as_ref().is_some_and(|transaction| transaction.failed)
    }

    pub fn savepoints(&self, session: usize) -> usize {
        self.sessions[session].as_ref().map_or(0, |transaction| transaction.savepoints.len())
    }

    pub fn any_transaction(&self) -> bool {
        self.sessions.iter().any(Option::is_some)
    }

    pub fn start(&mut self, session: usize) {
        self.sessions[session] = Some(Transaction::default());
    }

    /// Also what a crash or a lost connection does.
    pub fn roll_back(&mut self, session: usize) {
        self.sessions[session] = None;
    }

    pub fn commit(&mut self, session: usize) -> Result<(), String> {
        let transaction = self.sessions[session].take().expect("there is one to commit");
        if transaction.failed {
            return Ok(());
        }
        let Work { records, leases, held, .. } = transaction.work;
        if held.values().any(|held| held.end.is_none() && held.lease.is_none()) {
            return Err("ID007".to_string());
        }
        for (key, record) in records {
            match record {
                Some(record) => self.records.insert(key, record),
                None => self.records.remove(&key),
            };
        }
        for (name, lease) in leases {
            self.fences.insert(name, lease.fence);
            self.leases.insert(name, lease);
        }
        Ok(())
    }

    pub fn savepoint(&mut self, session: usize) {
        let transaction = self.sessions[session].as_mut().expect("in a transaction");
        transaction.savepoints.push(transaction.work.clone());
    }

    pub fn release_savepoint(&mut self, session: usize) {
        let transaction = self.sessions[session].as_mut().expect("in a transaction");
        transaction.savepoints.pop();
    }

    /// Back to the last savepoint, which stays.
    pub fn roll_back_to(&mut self, session: usize) {
        let transaction = self.sessions[session].as_mut().expect("in a transaction");
        transaction.work = transaction.savepoints.last().expect("there is one").clone();
        transaction.failed = false;
    }

    /// One call, in the session's transaction or in one of its own.
    pub fn call(
        &mut self,
        session: usize,
        call: impl FnOnce(&mut Contract, usize) -> Answer,
    ) -> Answer {
        if self.sessions[session].is_some() {
            let answer = call(self, session);
            if answer.is_err() {
                let transaction = self.sessions[session].as_mut().expect("in a transaction");
                transaction.work = transaction.savepoints.last().cloned().unwrap_or_default();
                transaction.failed = true;
            }
            return answer;
        }
        self.start(session);
        match call(self, session) {
            Ok(columns) => self.commit(session).map(|()| columns),
            Err(sqlstate) => {
                self.roll_back(session);
                Err(sqlstate)
            }
        }
    }

    fn work(&mut self, session: usize) -> &mut Work {
        &mut self.sessions[session].as_mut().expect("in a transaction").work
    }

    /// What the session sees: its own changes, else what is committed.
    fn record(&self, session: usize, key: usize) -> Option<Record> {
        let work = &self.sessions[session].as_ref().expect("in a transaction").work;
        work.records.get(&key).cloned().unwrap_or_else(|| self.records.get(&key).cloned())
    }

    fn lease(&self, session: usize, name: usize) -> Option<Lease> {
        let work = &self.sessions[session].as_ref().expect("in a transaction").work;
        work.leases.get(&name).or_else(|| self.leases.get(&name)).cloned()
    }

    fn has(&self, session: usize, kind: Kind, item: usize, mode: Mode) -> bool {
        let work = self.sessions[session].as_ref().map(|transaction| &transaction.work);
        work.is_some_and(|work| work.locks.contains(&(kind, item, mode)))
    }

    /// Whether another transaction has it in one of these modes.
    fn others(&self, session: usize, kind: Kind, item: usize, modes: &[Mode]) -> bool {
        let other = |other: usize| modes.iter().any(|mode| self.has(other, kind, item, *mode));
        (0..self.sessions.len()).filter(|other| *other != session).any(other)
    }

    /// Whether a change has to wait for another transaction.
    fn busy(&self, session: usize, kind: Kind, item: usize) -> bool {
        self.others(session, kind, item, &[Mode::Owns, Mode::Extends])
    }

    fn lock(&mut self, session: usize, kind: Kind, item: usize, mode: Mode) {
        self.work(session).locks.insert((kind, item, mode));
    }

    // ------------------------------------------------------------ keys

    fn open(&self, session: usize, key: usize) -> Option<Held> {
        let work = &self.sessions[session].as_ref().expect("in a transaction").work;
        work.held.get(&key).filter(|held| held.end.is_none()).cloned()
    }

    /// status, token, result, body, attempt, checkpoint, retry_after, completed_at, expires_at
    pub fn begin(
        &mut self,
        session: usize,
        key: usize,
        request: &Request,
        given: &Given,
    ) -> Answer {
        let now = self.now;
        let only = |status: &str| Ok([vec![text(status)], vec![None; 8]].concat());
        let acquired =
            |token: &str, attempt: i32, checkpoint: Option<String>, ends_at: Option<Moment>| {
                let [token, attempt] = [text(token), text(attempt)];
                let ends_at = ends_at.map(|end| end.to_string());
                let acquired = text("acquired");
                Ok(vec![acquired, token, None, None, attempt, checkpoint, None, None, ends_at])
            };
        let stored = self.record(session, key);
        if let Some(Held { record, lease, .. }) = self.open(session, key) {
            if differ(record.owner.as_deref(), request.owner) {
                return only("denied");
            }
            if differ(record.fingerprint.as_deref(), request.fingerprint) {
                return only("mismatch");
            }
            if lease != request.lease {
                return error(BAD);
            }
            // On a lease it may have been prolonged, and have got a checkpoint, since.
            let record = if lease.is_some() { stored.expect("a claim on a lease") } else { record };
            let ends_at = lease.map(|_| record.ends_at);
            return acquired(&record.token, record.attempt, record.checkpoint(), ends_at);
        }
        let live = stored.filter(|record| record.counts(now));
        let mut taken_over = None;
        if let Some(record) = live {
            if differ(record.owner.as_deref(), request.owner) {
                return only("denied");
            }
            if differ(record.fingerprint.as_deref(), request.fingerprint) {
                return only("mismatch");
            }
            let ends_at = text(record.ends_at);
            match &record.state {
                State::Completed { at, result, body } => {
                    let (result, body, at) = (result.clone(), body.clone(), text(at));
                    let completed = text("completed");
                    return Ok(vec![completed, None, result, body, None, None, None, at, ends_at]);
                }
                State::Claimed { .. } if now < record.ends_at => {
                    let retry_after = text(record.ends_at - now);
                    let status = text("in_progress");
                    return Ok(vec![
                        status,
                        None,
                        None,
                        None,
                        None,
                        None,
                        retry_after,
                        None,
                        ends_at,
                    ]);
                }
                State::Claimed { checkpoint, .. } if !request.takeover => {
                    let (status, attempt) = (text("abandoned"), text(record.attempt));
                    let checkpoint = checkpoint.clone();
                    return Ok(vec![
                        status, None, None, None, attempt, checkpoint, None, None, ends_at,
                    ]);
                }
                State::Claimed { .. } => taken_over = Some(record),
            }
        }
        if self.busy(session, Kind::Key, key) {
            return only("in_progress");
        }
        let checkpoint = taken_over.as_ref().and_then(Record::checkpoint);
        let mut record = Record {
            token: given.token.clone(),
            created_at: now,
            ends_at: now + request.lease.unwrap_or(0),
            attempt: 1,
            owner: request.owner.map(str::to_string),
            fingerprint: request.fingerprint.map(str::to_string),
            state: State::Claimed { lease: request.lease.unwrap_or(0), checkpoint },
        };
        if let Some(before) = taken_over {
            record.created_at = before.created_at;
            record.attempt = before.attempt + 1;
            record.owner = record.owner.or(before.owner);
            record.fingerprint = record.fingerprint.or(before.fingerprint);
        }
        if request.lease.is_some() {
            self.work(session).records.insert(key, Some(record.clone()));
        }
        let ends_at = request.lease.map(|_| record.ends_at);
        let answer = acquired(&record.token, record.attempt, record.checkpoint(), ends_at);
        self.work(session).held.insert(key, Held { record, lease: request.lease, end: None });
        self.lock(session, Kind::Key, key, Mode::Owns);
        answer
    }

    /// The claim that a caller means: made here and open, or whatever this token holds; or none that could be.
    fn meant(&self, session: usize, key: usize, token: Option<&str>) -> Option<Meant> {
        let work = &self.sessions[session].as_ref().expect("in a transaction").work;
        match (work.held.get(&key), token) {
            (Some(held), token) if token.is_none_or(|token| token == held.record.token) => {
                match held.end {
                    None if held.lease.is_none() => Some(Meant::Transaction(held.record.clone())),
                    None | Some(End::Completed) => Some(Meant::Stored(held.record.token.clone())),
                    Some(End::Released) => None,
                }
            }
            (Some(Held { end: None, .. }), Some(_)) | (_, None) => None,
            (_, Some(token)) => Some(Meant::Stored(token.to_string())),
        }
    }

    /// The stored claim of the token, once nobody else is about to change it.
    fn own(&self, session: usize, key: usize, token: &str) -> Result<Option<Record>, String> {
        if self.busy(session, Kind::Key, key) {
            return Err(WAITS.to_string());
        }
        let record = self.record(session, key);
        Ok(record.filter(|record| !record.is_completed() && record.token == token))
    }

    fn end(&mut self, session: usize, key: usize, end: End) {
        if let Some(held) = self.work(session).held.get_mut(&key)
            && held.end.is_none()
        {
            held.end = Some(end);
        }
    }

    pub fn complete(
        &mut self,
        session: usize,
        key: usize,
        token: Option<&str>,
        ttl: Option<Micros>,
        result: Option<String>,
        body: Option<String>,
    ) -> Answer {
        let done = Ok(vec![Some(String::new())]);
        let claim = match self.meant(session, key, token) {
            None => return error(LOST),
            Some(Meant::Transaction(record)) => record,
            Some(Meant::Stored(token)) => match self.own(session, key, &token)? {
                Some(record) => record,
                None => {
                    let again = self.record(session, key).is_some_and(|record| {
                        record.is_completed() && record.token == token && record.counts(self.now)
                    });
                    return if again { done } else { error(LOST) };
                }
            },
        };
        let ends_at = self.now + ttl.unwrap_or(self.ttl);
        let state = State::Completed { at: self.now, result, body };
        self.work(session).records.insert(key, Some(Record { ends_at, state, ..claim }));
        self.lock(session, Kind::Key, key, Mode::Owns);
        self.end(session, key, End::Completed);
        done
    }

    pub fn release(&mut self, session: usize, key: usize, token: Option<&str>) -> Answer {
        match self.meant(session, key, token) {
            None => return Ok(vec![text("f")]),
            Some(Meant::Transaction(_)) => {}
            Some(Meant::Stored(token)) => {
                if self.own(session, key, &token)?.is_none() {
                    return Ok(vec![text("f")]);
                }
            }
        }
        self.work(session).records.insert(key, None);
        self.lock(session, Kind::Key, key, Mode::Owns);
        self.end(session, key, End::Released);
        Ok(vec![text("t")])
    }

    /// Extends, or with a checkpoint saves it: the end of the lease.
    pub fn prolong(
        &mut self,
        session: usize,
        key: usize,
        token: Option<&str>,
        lease: Option<Micros>,
        saved: Option<String>,
    ) -> Answer {
        let token = match self.meant(session, key, token) {
            None => return error(LOST),
            Some(Meant::Transaction(_)) => return error(BAD),
            Some(Meant::Stored(token)) => token,
        };
        let Some(mut record) = self.own(session, key, &token)? else { return error(LOST) };
        if let State::Claimed { lease: last, checkpoint } = &mut record.state {
            *last = lease.unwrap_or(*last);
            record.ends_at = self.now + *last;
            if saved.is_some() {
                *checkpoint = saved.clone();
            }
        }
        let ends_at = record.ends_at;
        self.work(session).records.insert(key, Some(record));
        self.lock(session, Kind::Key, key, Mode::Extends);
        Ok(vec![if saved.is_some() { Some(String::new()) } else { text(ends_at) }])
    }

    /// state, owner, attempt, checkpoint, result, body, created_at, completed_at, expires_at; nothing if there is none
    pub fn get(&self, session: usize, key: usize, owner: Option<&str>) -> Answer {
        let record = self
            .record(session, key)
            .filter(|record| record.counts(self.now) && !differ(record.owner.as_deref(), owner));
        let Some(record) = record else { return Ok(vec![]) };
        let (owner, attempt) = (record.owner.clone(), text(record.attempt));
        let (created_at, ends_at) = (text(record.created_at), text(record.ends_at));
        Ok(match record.state {
            State::Completed { at, result, body } => {
                let state = text("completed");
                vec![state, owner, attempt, None, result, body, created_at, text(at), ends_at]
            }
            State::Claimed { checkpoint, .. } => {
                let over = record.ends_at <= self.now;
                let state = text(if over { "abandoned" } else { "in_progress" });
                vec![state, owner, attempt, checkpoint, None, None, created_at, None, ends_at]
            }
        })
    }

    pub fn forget(&mut self, session: usize, key: usize) -> Answer {
        let held = self.open(session, key).is_some();
        if !held && self.busy(session, Kind::Key, key) {
            return error(WAITS);
        }
        let stored = self.record(session, key);
        let found = held || stored.as_ref().is_some_and(|record| record.counts(self.now));
        if held || stored.is_some() {
            self.work(session).records.insert(key, None);
            self.lock(session, Kind::Key, key, Mode::Owns);
            self.end(session, key, End::Released);
        }
        Ok(vec![text(if found { "t" } else { "f" })])
    }

    pub fn once(
        &mut self,
        session: usize,
        key: usize,
        ttl: Option<Micros>,
        given: &Given,
    ) -> Answer {
        if self.open(session, key).is_some() {
            return error("ID001");
        }
        let request = Request { fingerprint: None, owner: None, lease: None, takeover: true };
        let begun = self.begin(session, key, &request, given)?;
        match begun[0].as_deref() {
            Some("acquired") => {
                self.complete(session, key, None, ttl, None, None)?;
                Ok(vec![text("t")])
            }
            Some("completed") => Ok(vec![text("f")]),
            _ => error("ID001"),
        }
    }

    // ------------------------------------------------------------ locks

    /// acquired, token, fence, expires_at, held_by, retry_after
    pub fn lock_try(
        &mut self,
        session: usize,
        name: usize,
        ttl: Option<Micros>,
        holder: Option<&str>,
        given: &Given,
    ) -> Answer {
        let now = self.now;
        let stored = self.lease(session, name);
        if let Some(lease) = stored.as_ref().filter(|lease| lease.is_running(now)) {
            let ends_at = text(lease.ends_at);
            let ours = self.work(session).leases.contains_key(&name);
            if ours && self.has(session, Kind::Name, name, Mode::Owns) {
                let (token, fence) = (lease.token.clone(), text(lease.fence));
                return Ok(vec![text("t"), token, fence, ends_at, None, None]);
            }
            let left = text(lease.ends_at - now);
            return Ok(vec![text("f"), None, None, ends_at, lease.holder.clone(), left]);
        }
        let all = [Mode::Owns, Mode::Extends, Mode::Guards];
        if self.others(session, Kind::Name, name, &all) {
            return Ok(vec![text("f"), None, None, None, None, None]);
        }
        // Where the row is gone, a floor stands for it, which is that of others too.
        let last = self.fences.get(&name).copied().unwrap_or(0);
        let least = stored.as_ref().map_or(last, |lease| lease.fence).max(now) + 1;
        let fence = if stored.is_none() { given.fence.max(least) } else { least };
        let ttl = ttl.unwrap_or(self.lock_ttl);
        let lease = Lease {
            token: Some(given.token.clone()),
            fence,
            ends_at: now + ttl,
            ttl,
            holder: holder.map(str::to_string),
        };
        self.work(session).leases.insert(name, lease);
        self.lock(session, Kind::Name, name, Mode::Owns);
        let token = text(&given.token);
        Ok(vec![text("t"), token, text(fence), text(now + ttl), None, None])
    }

    pub fn lock_try_xact(&mut self, session: usize, name: usize) -> Answer {
        let running = self.lease(session, name).is_some_and(|lease| lease.is_running(self.now));
        let all = [Mode::Owns, Mode::Extends, Mode::Guards];
        let taken = self.has(session, Kind::Name, name, Mode::Owns)
            || !running && !self.others(session, Kind::Name, name, &all);
        if taken {
            self.lock(session, Kind::Name, name, Mode::Owns);
        }
        Ok(vec![text(if taken { "t" } else { "f" })])
    }

    fn holds(&self, session: usize, name: usize, token: &str) -> Option<Lease> {
        self.lease(session, name)
            .filter(|lease| lease.token.as_deref() == Some(token) && self.now < lease.ends_at)
    }

    pub fn lock_extend(
        &mut self,
        session: usize,
        name: usize,
        token: &str,
        ttl: Option<Micros>,
    ) -> Answer {
        if self.busy(session, Kind::Name, name) {
            return error(WAITS);
        }
        let Some(mut lease) = self.holds(session, name, token) else { return error("ID011") };
        lease.ttl = ttl.unwrap_or(lease.ttl);
        lease.ends_at = self.now + lease.ttl;
        let ends_at = lease.ends_at;
        self.work(session).leases.insert(name, lease);
        self.lock(session, Kind::Name, name, Mode::Extends);
        Ok(vec![text(ends_at)])
    }

    pub fn lock_unlock(&mut self, session: usize, name: usize, token: &str) -> Answer {
        if self.busy(session, Kind::Name, name) {
            return error(WAITS);
        }
        let Some(mut lease) = self.holds(session, name, token) else {
            return Ok(vec![text("f")]);
        };
        if self.others(session, Kind::Name, name, &[Mode::Guards]) {
            return error(WAITS);
        }
        (lease.token, lease.holder, lease.ends_at) = (None, None, self.now.min(lease.ends_at));
        self.work(session).leases.insert(name, lease);
        self.lock(session, Kind::Name, name, Mode::Owns);
        Ok(vec![text("t")])
    }

    pub fn lock_guard(&mut self, session: usize, name: usize, token: &str) -> Answer {
        if self.others(session, Kind::Name, name, &[Mode::Owns]) {
            return error(WAITS);
        }
        let Some(lease) = self.holds(session, name, token) else {
            // Perhaps it is being prolonged just now.
            let waits = self.others(session, Kind::Name, name, &[Mode::Extends]);
            return error(if waits { WAITS } else { "ID011" });
        };
        self.lock(session, Kind::Name, name, Mode::Guards);
        Ok(vec![text(lease.fence)])
    }

    // ------------------------------------------------------------ purge

    /// A purge has committed, and of the stored rows only these are left. Says how many have gone, or which should not have.
    pub fn purged(
        &mut self,
        keys: &BTreeSet<usize>,
        names: &BTreeSet<usize>,
    ) -> Result<usize, String> {
        let (now, ttl) = (self.now, self.ttl);
        let before = self.records.len() + self.leases.len();
        for (key, record) in &self.records {
            if !keys.contains(key) && !record.may_go(now, ttl) {
                return Err(format!("a purge removed what still counts: {record:?}"));
            }
        }
        for (name, lease) in &self.leases {
            if !names.contains(name) && !lease.may_go(now, ttl) {
                return Err(format!("a purge removed what still counts: {lease:?}"));
            }
        }
        self.records.retain(|key, _| keys.contains(key));
        self.leases.retain(|name, _| names.contains(name));
        Ok(before - self.records.len() - self.leases.len())
    }
}

enum Meant {
    /// The claim of this transaction, which is stored nowhere.
    Transaction(Record),
    /// Whatever claim the token holds.
    Stored(String),
}
