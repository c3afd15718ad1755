#define _GNU_SOURCE
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
#include <dlfcn.h>
static int T[99], n, pid; static const char *conform, *work;
static void list(void){char p[64];n=0;sprintf(p,"/proc/%d/task",pid);DIR*d=opendir(p);struct dirent*e;while((e=readdir(d)))if(atoi(e->d_name))T[n++]=atoi(e->d_name);closedir(d);}
static void rd(const char*f,int t,char*o){char p[99];sprintf(p,"/proc/%d/task/%d/%s",pid,t,f);FILE*x=fopen(p,"r");o[0]=0;if(x){if(!fgets(o,200,x))o[0]=0;fclose(x);}o[strcspn(o,"\n")]=0;}
static int hold(int t){if(ptrace(PTRACE_SEIZE,t,0,0)||ptrace(PTRACE_INTERRUPT,t,0,0)){perror("seize");return -1;}return waitpid(t,0,__WALL)==t?0:-1;}
static void rel(int t){ptrace(PTRACE_DETACH,t,0,0);}
static int call(const char*c){char b[300];sprintf(b,"timeout -s KILL 6 %s --call %s %d",conform,c,pid);int r=system(b);r=WIFEXITED(r)?WEXITSTATUS(r):-WTERMSIG(r);return r;}
static void go(void){pid=fork();if(!pid){freopen("/dev/null","w",stdout);execl(work,"gpuwork","pattern","--bytes","64M","--port","41555",NULL);_exit(9);}sleep(4);list();}
static void end(void){kill(pid,9);waitpid(pid,0,0);}
static int tid(void){int(*f)(int,int*);void*h=dlopen("libcuda.so.1",RTLD_NOW);*(void**)&f=dlsym(h,"cuCheckpointProcessGetRestoreThreadId");int t=-1;f(pid,&t);return t;}
int main(int c,char**v){conform=v[1];work=v[2];setvbuf(stdout,0,_IONBF,0);
 go();int r=tid();printf("pid %d restore tid %d\n",pid,r);for(int i=0;i<n;i++){char a[300],b[300],w[300];rd("comm",T[i],a);rd("syscall",T[i],b);rd("wchan",T[i],w);printf(" %d %s | %s | %s\n",T[i],a,w,b);}
 kill(pid,SIGSTOP);sleep(1);printf("SIGSTOP: tid rc %d\n",call("tid"));printf("SIGSTOP: state rc %d\n",call("state"));kill(pid,SIGCONT);
 printf("running: tid rc %d state rc %d\n",call("tid"),call("state"));
 for(int i=0;i<n;i++){if(T[i]==r)continue;hold(T[i]);int a=call("lock"),s=-9,u=-9;rel(T[i]);usleep(300000);if(a==0)u=call("unlock");else s=call("state");printf("hold only %d: lock %d unlock %d state-after %d\n",T[i],a,u,s);if(a){end();go();r=tid();printf("new pid %d tid %d threads %d\n",pid,r,n);}}
 for(int i=0;i<n;i++)if(T[i]!=r)hold(T[i]);
 int s0=call("state"),t0=call("tid"),a=call("lock");printf("hold all but restore: state %d tid %d lock %d\n",s0,t0,a);for(int i=0;i<n;i++)if(T[i]!=r)rel(T[i]);sleep(1);printf("released: state %d\n",call("state"));end();
 go();r=tid();printf("lock running %d\n",call("lock"));list();for(int i=0;i<n;i++)if(T[i]!=r)hold(T[i]);
 printf("held: checkpoint %d\n",call("checkpoint"));printf("held: state %d\n",call("state"));printf("held: restore %d\n",call("restore"));printf("held: unlock %d\n",call("unlock"));for(int i=0;i<n;i++)if(T[i]!=r)rel(T[i]);printf("released: state %d\n",call("state"));end();return 0;}
