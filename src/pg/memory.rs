//! Memory that outlives the session that made it and that others can read: PostgreSQL's dynamic shared memory, which
//! needs no `shared_preload_libraries`. It is gone when the server stops or crashes.
//!
//! Its name is a number that also tells a piece from others that get the same handle later. A piece is filled by the one who made it, and
//! never changed after [`Memory::keep`] has let others know of it.

use super::trap::in_subtransaction;
use pgrx::pg_sys;

/// The words at the beginning of a piece, before those that are the caller's: its name.
const HEAD: usize = 8;

/// What a name looks like in memory.
const MARK: u64 = 0x6964_656d_2d6d_656d;

/// A piece of shared memory that this session has mapped.
#[derive(Clone, Copy)]
pub struct Memory {
    segment: *mut pg_sys::dsm_segment,
    name: i64,
}

impl Memory {
    /// New memory of so many words of zeros. Until it is kept it is gone with the transaction. `None` if there is none to be had.
    pub fn create(words: usize) -> Option<Memory> {
        // SAFETY: a plain global, set once when the process starts.
        if !unsafe { pg_sys::IsUnderPostmaster } {
            return None;
        }
        let bytes = (HEAD + words) * size_of::<u64>();
        let made = in_subtransaction(|| {
            // SAFETY: pinned, it is not given back with the subtransaction.
            unsafe {
                let flags = pg_sys::DSM_CREATE_NULL_IF_MAXSEGMENTS as i32;
                let segment = pg_sys::dsm_create(bytes, flags);
                if !segment.is_null() {
                    pg_sys::dsm_pin_mapping(segment);
                }
                segment
            }
        });
        let segment = made.ok().filter(|segment| !segment.is_null())?;
        let [a, b, c, d, ..] = super::new_token();
        let number = i64::from(u32::from_be_bytes([a, b, c, d]) >> 1);
        // SAFETY: the segment is mapped, at least as long as was asked for, and starts at a page.
        unsafe {
            pg_sys::dsm_unpin_mapping(segment);
            let name = number << 32 | i64::from(pg_sys::dsm_segment_handle(segment));
            let start: *mut u64 = pg_sys::dsm_segment_address(segment).cast();
            start.write_bytes(0, HEAD + words);
            start.write(MARK ^ name as u64);
            start.add(1).write(words as u64);
            Some(Memory { segment, name })
        }
    }

    /// The memory of that name, mapped until [`Memory::forget`]. `None` if it is gone.
    pub fn find(name: i64) -> Option<Memory> {
        let handle = name as u32;
        let found = in_subtransaction(|| {
            // SAFETY: any handle may be asked for that is not mapped yet.
            unsafe {
                if !pg_sys::IsUnderPostmaster || !pg_sys::dsm_find_mapping(handle).is_null() {
                    return std::ptr::null_mut();
                }
                let segment = pg_sys::dsm_attach(handle);
                if !segment.is_null() {
                    pg_sys::dsm_pin_mapping(segment);
                }
                segment
            }
        });
        let segment = found.ok().filter(|segment| !segment.is_null())?;
        let memory = Memory { segment, name };
        if memory.is_ours() {
            return Some(memory);
        }
        memory.forget();
        None
    }

    /// Whether it is what its name says, and not what somebody else got the same handle for.
    fn is_ours(&self) -> bool {
        // SAFETY: the segment is mapped; what is read lies in it.
        unsafe {
            let bytes = pg_sys::dsm_segment_map_length(self.segment);
            let start: *const u64 = pg_sys::dsm_segment_address(self.segment).cast();
            bytes >= HEAD * size_of::<u64>()
                && start.read() == MARK ^ self.name as u64
                && (HEAD as u64 + start.add(1).read()) * size_of::<u64>() as u64 <= bytes as u64
        }
    }

    pub fn name(&self) -> i64 {
        self.name
    }

    /// The words; those of memory that is kept never change.
    pub fn words(&self) -> &[u64] {
        // SAFETY: `find` and `create` made sure that there are so many, and the segment is mapped.
        unsafe {
            let start: *const u64 = pg_sys::dsm_segment_address(self.segment).cast();
            std::slice::from_raw_parts(start.add(HEAD), start.add(1).read() as usize)
        }
    }

    /// The words of memory that nobody else knows of yet.
    pub fn words_mut(&mut self) -> &mut [u64] {
        // SAFETY: as for `words`.
        unsafe {
            let start: *mut u64 = pg_sys::dsm_segment_address(self.segment).cast();
            std::slice::from_raw_parts_mut(start.add(HEAD), start.add(1).read() as usize)
        }
    }

    /// Has new memory stay when this session is gone, until [`Memory::discard`], and unmaps it here.
    pub fn keep(self) {
        // SAFETY: made by `create` and not kept before.
        unsafe { pg_sys::dsm_pin_segment(self.segment) };
        self.forget();
    }

    /// Unmaps it here. It must not be used again.
    pub fn forget(self) {
        // SAFETY: mapped, and by the caller's word no more in use.
        unsafe { pg_sys::dsm_detach(self.segment) };
    }

    /// Gives the memory back once nobody has it mapped any more. It is not an error if somebody has done so before.
    pub fn discard(&self) {
        let handle = self.name as u32;
        // SAFETY: any handle is allowed; one that is not pinned is an error, which is swallowed.
        let _ = in_subtransaction(|| unsafe { pg_sys::dsm_unpin_segment(handle) });
    }
}
