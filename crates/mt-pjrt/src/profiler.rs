//! Profiles that a plugin records of its devices and its own threads.

use std::{
    ffi::{c_int, c_void},
    mem::offset_of,
    ptr,
};

use crate::{
    Error, ErrorCode, PjrtError, Plugin,
    plugin::{array, text},
    sys::{self, ProfilerApi, ProfilerFunction},
};

/// A profile that is being recorded. Dropping it discards the records.
pub struct Profile {
    api: &'static ProfilerApi,
    session: *mut sys::ProfilerSession,
}

impl Plugin {
    /// Begins a profile; none if the plugin has no profiler.
    ///
    /// # Errors
    /// The profiler does not start, most likely because another profile is being recorded.
    pub fn start_profile(&self) -> Result<Option<Profile>, Error> {
        self.profiler().map(Profile::start).transpose()
    }
}

impl Profile {
    fn start(api: &'static ProfilerApi) -> Result<Self, Error> {
        let mut create = sys::ProfilerCreate {
            struct_size: size_of::<sys::ProfilerCreate>(),
            options: ptr::null(),
            options_size: 0,
            session: ptr::null_mut(),
        };
        // SAFETY: the structure is the function's own; no options are the default ones.
        unsafe { call(api, api.create, &mut create, "PLUGIN_Profiler_Create") }?;
        let profile = Profile { api, session: create.session };
        profile.with_session(api.start, "PLUGIN_Profiler_Start")?;
        Ok(profile)
    }

    /// Ends the profile. Returns it as a serialized `XSpace`.
    ///
    /// # Errors
    /// The profiler fails.
    pub fn finish(self) -> Result<Vec<u8>, Error> {
        const COLLECT: &str = "PLUGIN_Profiler_CollectData";
        self.with_session(self.api.stop, "PLUGIN_Profiler_Stop")?;
        let mut collect = sys::ProfilerCollect {
            struct_size: size_of::<sys::ProfilerCollect>(),
            session: self.session,
            buffer: ptr::null_mut(),
            buffer_size: 0,
        };
        // SAFETY: the structure is the function's own, and the session is alive.
        unsafe { call(self.api, self.api.collect_data, &mut collect, COLLECT) }?;
        if !collect.buffer.is_null() {
            // SAFETY: the buffer is the session's, which lives until this function returns.
            return Ok(unsafe { array(collect.buffer, collect.buffer_size) }.to_vec());
        }
        // Otherwise the first call returns only the size.
        let mut bytes = vec![0u8; collect.buffer_size];
        if !bytes.is_empty() {
            collect.buffer = bytes.as_mut_ptr();
            // SAFETY: as above; the buffer has the size that the first call gave.
            unsafe { call(self.api, self.api.collect_data, &mut collect, COLLECT) }?;
        }
        Ok(bytes)
    }

    fn with_session(&self, function: Option<ProfilerFunction>, name: &'static str) -> Result<(), Error> {
        let mut handle =
            sys::ProfilerHandle { struct_size: size_of::<sys::ProfilerHandle>(), session: self.session };
        // SAFETY: the structure is the function's own, and the session is alive.
        unsafe { call(self.api, function, &mut handle, name) }
    }
}

impl Drop for Profile {
    fn drop(&mut self) {
        // A profile that cannot be freed leaks.
        let _ = self.with_session(self.api.destroy, "PLUGIN_Profiler_Destroy");
    }
}

/// Calls a function of the profiler.
///
/// # Safety
/// `arguments` is the structure of the function, and its pointers are valid.
unsafe fn call<A>(
    api: &ProfilerApi,
    function: Option<ProfilerFunction>,
    arguments: &mut A,
    name: &'static str,
) -> Result<(), Error> {
    let error = match function {
        // SAFETY: the caller vouches for the structure.
        Some(function) => unsafe { function((&raw mut *arguments).cast()) },
        None => {
            let message = "the plugin does not have this function".to_owned();
            return Err(
                PjrtError { code: ErrorCode::Unimplemented, message, program: None, call: name }.into()
            );
        }
    };
    if error.is_null() {
        return Ok(());
    }
    let mut message = sys::ProfilerErrorMessage {
        struct_size: size_of::<sys::ProfilerErrorMessage>(),
        private: ptr::null_mut(),
        error,
        message: ptr::null(),
        message_size: 0,
    };
    let mut code = sys::ProfilerErrorGetCode {
        // The header counts no padding behind the last field.
        struct_size: offset_of!(sys::ProfilerErrorGetCode, code) + size_of::<c_int>(),
        private: ptr::null_mut(),
        error,
        code: 0,
    };
    let mut destroy = sys::ProfilerErrorDestroy {
        struct_size: size_of::<sys::ProfilerErrorDestroy>(),
        private: ptr::null_mut(),
        error,
    };
    // SAFETY: the error is valid until it is destroyed at the end, after its message was copied. The functions without a
    // result are called through a type that returns a pointer, which is ignored.
    let (message, code) = unsafe {
        let plain = |function: Option<ProfilerFunction>, arguments: *mut c_void| {
            if let Some(function) = function {
                function(arguments);
            }
        };
        plain(api.error_message, (&raw mut message).cast());
        let text = text(message.message, message.message_size);
        plain(api.error_get_code, (&raw mut code).cast());
        plain(api.error_destroy, (&raw mut destroy).cast());
        (text, ErrorCode::from_raw(code.code))
    };
    Err(PjrtError { code, message, program: None, call: name }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    static BYTES: [u8; 3] = [1, 2, 3];
    /// Stands for a session and for an error, which are opaque.
    static mut OBJECT: u8 = 0;

    fn object<T>() -> *mut T {
        (&raw mut OBJECT).cast()
    }

    unsafe extern "C" fn succeed(_: *mut c_void) -> *mut sys::ProfilerError {
        ptr::null_mut()
    }

    unsafe extern "C" fn fail(_: *mut c_void) -> *mut sys::ProfilerError {
        object()
    }

    unsafe extern "C" fn create(arguments: *mut c_void) -> *mut sys::ProfilerError {
        // SAFETY: the function receives its own structure.
        unsafe { (*arguments.cast::<sys::ProfilerCreate>()).session = object() };
        ptr::null_mut()
    }

    /// Returns a buffer of its own.
    unsafe extern "C" fn lend(arguments: *mut c_void) -> *mut sys::ProfilerError {
        // SAFETY: the function receives its own structure.
        let collect = unsafe { &mut *arguments.cast::<sys::ProfilerCollect>() };
        (collect.buffer, collect.buffer_size) = (BYTES.as_ptr().cast_mut(), BYTES.len());
        ptr::null_mut()
    }

    /// Fills a buffer of the caller.
    unsafe extern "C" fn fill(arguments: *mut c_void) -> *mut sys::ProfilerError {
        // SAFETY: the function receives its own structure, and a buffer of the size that it returned before.
        unsafe {
            let collect = &mut *arguments.cast::<sys::ProfilerCollect>();
            collect.buffer_size = BYTES.len();
            if !collect.buffer.is_null() {
                collect.buffer.copy_from(BYTES.as_ptr(), BYTES.len());
            }
        }
        ptr::null_mut()
    }

    unsafe extern "C" fn message(arguments: *mut c_void) -> *mut sys::ProfilerError {
        const TEXT: &str = "no room";
        // SAFETY: the function receives its own structure.
        let message = unsafe { &mut *arguments.cast::<sys::ProfilerErrorMessage>() };
        (message.message, message.message_size) = (TEXT.as_ptr().cast(), TEXT.len());
        ptr::null_mut()
    }

    unsafe extern "C" fn code(arguments: *mut c_void) -> *mut sys::ProfilerError {
        // SAFETY: the function receives its own structure.
        let code = unsafe { &mut *arguments.cast::<sys::ProfilerErrorGetCode>() };
        assert_eq!(code.struct_size, 28);
        code.code = 9;
        ptr::null_mut()
    }

    fn profiler(start: ProfilerFunction, collect: ProfilerFunction) -> &'static ProfilerApi {
        Box::leak(Box::new(ProfilerApi {
            struct_size: size_of::<ProfilerApi>(),
            private: ptr::null_mut(),
            error_destroy: Some(succeed),
            error_message: Some(message),
            error_get_code: Some(code),
            create: Some(create),
            destroy: Some(succeed),
            start: Some(start),
            stop: Some(succeed),
            collect_data: Some(collect),
        }))
    }

    #[test]
    fn profiles_are_collected_from_both_kinds_of_buffers() {
        for collect in [lend as ProfilerFunction, fill] {
            assert_eq!(Profile::start(profiler(succeed, collect)).unwrap().finish().unwrap(), BYTES);
        }
    }

    #[test]
    fn failures_have_the_profilers_message() {
        let error = Profile::start(profiler(fail, lend)).err().unwrap();
        let Error::Pjrt(PjrtError { code, message, call, .. }) = &error else { panic!("{error}") };
        assert_eq!((*code, message.as_str()), (ErrorCode::FailedPrecondition, "no room"));
        assert_eq!(*call, "PLUGIN_Profiler_Start");
    }
}
