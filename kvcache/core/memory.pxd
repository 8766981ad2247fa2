# Objects for a call's result, allocated without running Python.
#
# CPython 3.11 may collect garbage inside an allocation. A finalizer may then call the same table in the middle of an
# operation, and rows that were just looked up would belong to other keys. Later versions collect between bytecodes.

cdef extern from *:
    """
    #if PY_VERSION_HEX < 0x030C0000
    #define kv_pause_collector() PyGC_Disable()
    #define kv_resume_collector(was_on) do { if (was_on) PyGC_Enable(); } while (0)
    #else
    #define kv_pause_collector() 0
    #define kv_resume_collector(was_on) ((void)(was_on))
    #endif
    static inline PyObject *kv_new_list(Py_ssize_t n)
    {
        int was_on = kv_pause_collector();
        PyObject *list = PyList_New(n);
        kv_resume_collector(was_on);
        return list;
    }
    static inline PyObject *kv_new_object(PyObject *cls)
    {
        int was_on = kv_pause_collector();
        PyObject *object = ((PyTypeObject *)cls)->tp_alloc((PyTypeObject *)cls, 0);
        kv_resume_collector(was_on);
        return object;
    }
    """
    bint pause_collector "kv_pause_collector"() noexcept
    void resume_collector "kv_resume_collector"(bint was_on) noexcept
    list new_list "kv_new_list"(Py_ssize_t n)
    # For a class written in Python: skips the look-up of __new__ and the call of __init__.
    object new_object "kv_new_object"(object cls)
