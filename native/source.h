/* SPDX-License-Identifier: Apache-2.0
 *
 * The plain call, from its text to its end, by the interpreter's C interface. Part of forkin.c.
 *
 * zygote.py can do all of this, and does whatever is not plain. But each object that Python code so much as looks at has its count of
 * references written, and its page copied: the way through Python is 55 such pages more, a fifth of what the call's process costs.
 */
#ifndef SOURCE_H
#define SOURCE_H

#include "raw.h"

struct compiler_flags {
	int flags, feature_version;
};

/* Filled in by zygote.py, in this order: functions of the interpreter, then objects. */
struct python {
	void *(*loads)(const u8 *, long); /* PyMarshal_ReadObjectFromString */
	void *(*item)(void *, long);	  /* PyTuple_GetItem */
	int (*compare)(void *, const char *); /* PyUnicode_CompareWithASCIIString */
	const char *(*utf8)(void *, long *);  /* PyUnicode_AsUTF8AndSize */
	long (*size)(void *);		      /* PyDict_Size */
	void *(*get)(void *, void *);	      /* PyDict_GetItem */
	void (*clear)(void *);		      /* PyDict_Clear */
	void *(*compile)(const char *, void *, int, struct compiler_flags *, int); /* Py_CompileStringObject */
	void *(*eval)(void *, void *, void *);					   /* PyEval_EvalCode */
	void *(*call)(void *, void *);						   /* PyObject_CallObject */
	void (*forget)(void);							   /* PyErr_Clear */
	long (*length)(void *); /* PyList_Size */
	void (*release)(void *); /* Py_DecRef */
	int *depth_left; /* how much deeper functions may call each other, or 0 */
	void *space, *path, *modules, *threading, *exits, *none_exits, *sys;
	void *aged, *collect, *all, *young; /* gc.get_objects, gc.collect, and what to call them with */
	void *stream_names[4], *streams[4], *flushes[4];
	long n_modules, minor, n_own;
	void *own[2 * 10]; /* what is in `space` before the call: names, each with its value */
};

enum { BY_PYTHON, RAISED, RAN }; /* what is left to do: all; report the exception that is set; the end */

enum { FILE_INPUT = 257, IGNORE_COOKIE = 0x800, SOURCE_IS_UTF8 = 0x100 };

/* A program that has defined nothing: to take apart what was there before would be to write to 7 pages. */
static int defined_nothing(const struct python *p)
{
	int same = p->size(p->space) == p->n_own;
	for (int i = 0; i < p->n_own && same; i++)
		same = p->get(p->space, p->own[2 * i]) == p->own[2 * i + 1];
	return same;
}

/* What zygote.py's `finish` does, where nothing that it looks for is there. Whatever fails is left to it, it may be done twice. */
static void end_plainly(const struct python *p)
{
	if (p->size(p->modules) != p->n_modules || p->get(p->modules, p->threading) || p->call(p->exits, 0) != p->none_exits)
		return;
	for (int i = 0; i < 4; i++)
		if (p->get(p->sys, p->stream_names[i]) != p->streams[i])
			return;
	if (!defined_nothing(p))
		p->clear(p->space);
	/* To collect everything is to empty the interpreter's lists of free objects, too: 8 pages written for nothing. Where no collection has
	 * left objects of the call among the old yet, the young are all there are. */
	void *aged = p->call(p->aged, p->all);
	if (!aged)
		return;
	void *which = p->length(aged) ? p->all : p->young;
	p->release(aged); /* it holds them */
	if (!p->call(p->collect, which))
		return;
	for (int i = 0; i < 4; i++)
		if (!p->call(p->flushes[i], 0))
			return;
	quit(0);
}

static int run_source(const struct python *p, const u8 *body, long len)
{
	struct compiler_flags flags = { IGNORE_COOKIE | SOURCE_IS_UTF8, (int)p->minor };
	long n;
	void *call = p->loads(body, len);
	if (!call || p->compare(p->item(call, 0), "source") || p->compare(p->item(call, 2), "main.py") || p->size(p->item(call, 6)))
		goto not_plain;
	const char *text = p->utf8(p->item(call, 1), &n);
	if (!text || length(text) != (size_t)n)
		goto not_plain;
	if (n >= 3 && same(text, "\xEF\xBB\xBF", 3)) /* a byte order mark, as files may have it */
		text += 3;
	void *code = p->compile(text, p->path, FILE_INPUT, &flags, -1);
	if (p->depth_left) /* as much as the limit says: that we were called took 6 */
		*p->depth_left = p->depth_left[1];
	if (!code || !p->eval(code, p->space, p->space))
		return RAISED;
	end_plainly(p);
	p->forget();
	return RAN;
not_plain:
	p->forget();
	return BY_PYTHON;
}

#endif
